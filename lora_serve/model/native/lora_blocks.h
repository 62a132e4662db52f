/* Adapters of bfloat16 on inputs of bfloat16, in the order of product_blocks.h: both x A^T, which is rounded, and its
 * product by B are products like the base's. One token without tiles of its own would be most of a tile of zeros: its x
 * is the right-hand matrix of x A^T, and B is read as it lies. */
#define DEPTH_TURNED 512 /* inputs of A at a time */
#define COLUMNS 128 /* of A and B, ahead of those that are multiplied, are asked for */

/* s = scale * x A^T of several adapters of one x, side by side in panels of ranks. */
static void shrink_together(const Shrink *own, int64_t count, int64_t tokens, const real *x, int64_t x_stride,
                            int64_t in) {
    static const float nothing[PANEL];
    uint32_t panel[DEPTH_TURNED / 2 * PANEL] = {0};
    float totals[ROW_BLOCK * PANEL];
    input room[ROOM];
    const int64_t whole = in / DEPTH_UNIT * DEPTH_UNIT;
    int64_t at = 0, rank = 0; /* the first that is not done */
    while (at < count) {
        const real *rows[PANEL];
        float scales[PANEL];
        const int64_t first = at, first_rank = rank;
        int64_t taken = 0;
        for (; at < count; at++, rank = 0) {
            for (; rank < own[at].rank && taken < PANEL; rank++, taken++)
                rows[taken] = own[at].a + rank * in, scales[taken] = own[at].scale;
            if (rank < own[at].rank) break;
        }
        if (taken == 0) break;
        for (int64_t c = taken; c < PANEL; c++) rows[c] = rows[0], scales[c] = 0.0f; /* nobody reads these columns */
        for (int64_t t = 0, some; t < tokens; t += some) {
            some = least(ROW_BLOCK, tokens - t);
            for (int64_t k = 0, depth; k < in; k += depth) {
                depth = k < whole ? least(DEPTH_TURNED, whole - k) : in - k;
                for (int64_t c = 0; c < taken; c += LANES)
                    turn_rows(rows + c, k, in, up_to(depth, DEPTH_UNIT), panel + c);
                int64_t stride = x_stride;
                const input *from = prepared(x + t * x_stride + k, &stride, some, depth, room);
                multiply_by(from, stride, some, panel, PANEL, 0, 1, depth, k ? NULL : nothing, totals, PANEL);
            }
            for (int64_t i = 0; i < some; i++) {
                real rounded[PANEL];
                for (int64_t c = 0; c < PANEL; c += LANES)
                    store_real(rounded + c, load(scales + c) * load(totals + i * PANEL + c));
                int64_t done = 0, from = first_rank;
                for (int64_t n = first; done < taken; n++, from = 0) {
                    const int64_t size = least(own[n].rank - from, taken - done);
                    memcpy(own[n].s + (t + i) * own[n].s_stride + from, rounded + done, size * sizeof(real));
                    done += size;
                }
            }
        }
    }
}

#ifdef TILE_ROWS

/* Tiles of x A^T for one token: sums in 0 and 1, two times up to 16 rows of A in 2 and 3, x in 4. */
static void shape_for_one(int64_t first, int64_t second) {
    const int64_t shape = -first - 32 * second;
    if (shape == shaped_for) return;
    TileShapes shapes = {.palette = 1};
    for (int t = 0; t < 4; t++) shapes.bytes[t] = t < 2 ? 4 : 64, shapes.rows[t] = t % 2 && second ? second : first;
    shapes.bytes[4] = 4, shapes.rows[4] = 16;
    _tile_loadconfig(&shapes);
    shaped_for = shape;
}

/* totals [32] of one token and up to 32 rows of A. Of `next`, whose rows are next_row apart, the first columns are asked
 * for at the end. */
static void shrink_one(int64_t ranks, const real *x, const real *a, int64_t in, float *totals, const real *next, int64_t next_row) {
    const int64_t first = least(ranks, TILE_ROWS), second = ranks - first, whole = in / DEPTH_UNIT * DEPTH_UNIT;
    shape_for_one(first, second);
    _tile_zero(0);
    _tile_zero(1);
    real x_end[DEPTH_UNIT], a_end[2 * TILE_ROWS][DEPTH_UNIT];
    for (int64_t k = 0; k < in; k += DEPTH_UNIT) {
        const real *own = a + k, *part = x + k;
        int64_t stride = in;
        if (k == whole) {
            cut_out(x, k, in, DEPTH_UNIT, x_end);
            for (int64_t j = 0; j < ranks; j++) cut_out(a + j * in, k, in, DEPTH_UNIT, a_end[j]);
            own = a_end[0], part = x_end, stride = DEPTH_UNIT;
        }
        __asm__ volatile("" ::: "memory");
        _tile_loadd(4, part, 4);
        _tile_loadd(2, own, 2 * stride);
        _tile_dpbf16ps(0, 2, 4);
        if (second) {
            _tile_loadd(3, own + TILE_ROWS * stride, 2 * stride);
            _tile_dpbf16ps(1, 3, 4);
        }
        if (k + COLUMNS < in)
            for (int64_t j = 0; j < ranks; j++) __builtin_prefetch(a + j * in + k + COLUMNS);
        else
            for (int64_t j = 0; j < ranks && next; j++) __builtin_prefetch(next + j * next_row + k + COLUMNS - in);
    }
    _tile_stored(0, totals, 4);
    if (second) _tile_stored(1, totals + TILE_ROWS, 4);
}

#define FEW 3 /* tokens, for which A is not worth turning */

ALWAYS void shrink_few(const Shrink *own, int64_t tokens, const real *x, int64_t x_stride, int64_t in, const real *after,
                       int64_t after_row) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0, ranks; j < own->rank; j += ranks) {
            float totals[2 * TILE_ROWS];
            ranks = least(2 * TILE_ROWS, own->rank - j);
            shrink_one(ranks, x + t * x_stride, own->a + j * in, in, totals,
                       j + ranks < own->rank ? own->a + (j + ranks) * in : t ? NULL : after,
                       j + ranks < own->rank ? in : after_row);
            for (int64_t r = 0; r < ranks; r++) own->s[t * own->s_stride + j + r] = real_of(own->scale * totals[r]);
        }
}

#endif

static void shrink_piece(const Shrink *own, int64_t tokens, const real *x, int64_t x_stride, int64_t in,
                         const real *after, int64_t after_row) {
#ifdef TILE_ROWS
    if (tokens <= FEW) {
        shrink_few(own, tokens, x, x_stride, in, after, after_row);
        return;
    }
#endif
    (void)after, (void)after_row;
    shrink_together(own, 1, tokens, x, x_stride, in);
}

/* PANEL outputs at even and at odd places, of up to 32 ranks: sums of the first and of the second ranks of the pairs. */
ALWAYS void expand_panel(const float *h, int64_t ranks, const real *b, int64_t out, const real *next,
                         int64_t next_row, vec *even, vec *odd) {
    vec low, high;
    for (int64_t r = 0; r < ranks; r += 2) {
        load_pairs(b + r * out, &low, &high);
        __builtin_prefetch(next + r * next_row);
        even[0] += splat(h[r]) * low, odd[0] += splat(h[r]) * high;
        if (r + 1 == ranks) break;
        load_pairs(b + (r + 1) * out, &low, &high);
        __builtin_prefetch(next + (r + 1) * next_row);
        even[1] += splat(h[r + 1]) * low, odd[1] += splat(h[r + 1]) * high;
    }
}

/* y += s B for one token. After the last rank come zeros up to 32: they make 0 of a sum that is -0. */
static void expand_one(const real *s, const real *b, int64_t rank, int64_t out, float *y, const real *after,
                       int64_t after_row) {
    for (int64_t j = 0; j < rank; j += DEPTH_UNIT) {
        const int64_t ranks = least(DEPTH_UNIT, rank - j);
        const real *own = b + j * out;
        const int is_last = j + DEPTH_UNIT >= rank;
        const real *next = is_last ? after : own + DEPTH_UNIT * out;
        const int64_t next_row = is_last ? after_row : out;
        const float zeros[2] = {ranks < DEPTH_UNIT - 1 ? 0.0f : -0.0f, ranks < DEPTH_UNIT ? 0.0f : -0.0f};
        float h[DEPTH_UNIT];
        for (int64_t r = 0; r < ranks; r++) h[r] = float_of(s[j + r]);
        int64_t o = 0;
        for (; o + PANEL <= out; o += PANEL) {
            vec even[2] = {}, odd[2] = {};
            const int is_inside = o + COLUMNS < out;
            expand_panel(h, ranks, own + o, out, is_inside ? own + o + COLUMNS : next + o + COLUMNS - out,
                         is_inside ? out : next_row, even, odd);
            for (int i = 0; i < 2; i++) even[i] += zeros[i], odd[i] += zeros[i];
            ZIP(even[0] + even[1], odd[0] + odd[1], first, second);
            store(y + o, load(y + o) + first);
            store(y + o + LANES, load(y + o + LANES) + second);
        }
        for (; o < out; o++) {
            float sum[2] = {0.0f, 0.0f};
            for (int64_t r = 0; r < ranks; r++) sum[r % 2] = fmaf(h[r], float_of(own[r * out + o]), sum[r % 2]);
            y[o] += (sum[0] + zeros[0]) + (sum[1] + zeros[1]);
        }
    }
}
