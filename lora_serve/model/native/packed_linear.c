/* y = x W^T + bias for a frozen weight W [out, in] that was laid out once, in panels of PANEL outputs, by kind:
 *
 *     FLOATS       [panels][in][PANEL] float32
 *     PAIRS        the same in bfloat16 in half the bytes, for float32 products: nothing is lost
 *     DEPTH_PAIRS  [panels][pairs of in][PANEL][2] bfloat16, for products of bfloat16 inputs
 *
 * x [rows, in] is `real`, y [rows, out] float32 sums. Depth is cut so that a panel's part and the rows of x that are
 * multiplied together stay in the first cache, rows so that their part of x stays in the second; threads share the
 * panels. How a few rows are multiplied by a panel is in product_<order>.h.
 */
#include "panels.h"
#include "threads.h"

#define MOST_JOINED 3
#define MOST_RANK 64 /* of what is added to sums while they are at hand */

typedef struct { /* an adapter's part in the columns of one linear layer: s [rows][depth] by B [rank][out]; b NULL: none */
    const real *s, *b;
    int64_t rank, depth, column, out;
} Part;

typedef struct { /* some rows, and what one adapter adds to their complete sums */
    int64_t first, rows;
    Part parts[MOST_JOINED];
} Run;

typedef struct {
    const real *x;
    int64_t x_stride, rows, in;
    const uint32_t *w;
    int64_t kind;
    const float *bias;
    float *y;
    int64_t out;
    const Run *runs; /* in order */
    int64_t num_runs;
    int64_t group, depth; /* of codes: places of depth that share a scale, and all of them */
    const int32_t *order; /* of codes: the number of x that each place of depth takes, -1: 0; NULL: all as they lie */
} Product;

typedef struct { /* some rows of x from k on as products have it; totals: of codes, of each row's groups */
    int64_t k, depth, stride;
    const input *x;
    const float *totals;
    int64_t total_step;
} Chunk;

static Chunk rows_from(Chunk c, int64_t row) {
    c.x += row * c.stride;
    if (c.totals) c.totals += row * c.total_step;
    return c;
}

static int64_t product_words(const Product *p) {
    return IS_CODES(p->kind) ? coded_panel_words(p->kind, p->depth, p->group) : panel_words(p->kind, p->in);
}

int64_t panel_outputs(void) { return PANEL; }

/* Places of depth that a group of codes is filled up to. */
int64_t code_unit(void) { return DEPTH_UNIT > 8 ? DEPTH_UNIT : 8; }

/* 4-byte words of a panel. */
int64_t words_of_panel(int64_t kind, int64_t in) { return panel_words(kind, in); }
int64_t words_of_codes(int64_t kind, int64_t depth, int64_t group) { return coded_panel_words(kind, depth, group); }

/* The groups of a chunk, those of panels whose words begin at `panel`; expanded: its codes, if they are. */
static void multiply_groups(const Product *p, Group *g, const Chunk *c, const uint32_t *panel, const uint32_t *expanded) {
    const int64_t first = c->k / p->group, groups = (p->depth + p->group - 1) / p->group;
    const char *scales = (const char *)(panel + code_words(p->kind, p->depth));
    const char *zeros = scales + groups * PANEL * scale_bytes(p->kind);
    g->w = expanded ? expanded : panel + code_words(p->kind, c->k);
    g->beside = (Beside){p->kind, 4 * g->w_step, p->group, scales + first * PANEL * scale_bytes(p->kind),
                         (const int8_t *)zeros + first * PANEL, c->totals, c->total_step};
    begin(g);
    multiply_codes(g);
    if (g->then) multiply(g->then);
}

/* `rows` rows of x, those of c, times `panels` panels; an incomplete last one by buffers.
 * `more`: what goes on with the sums of these rows, NULL for nothing. */
static void block(const Product *p, int64_t row, int64_t rows, int64_t panel, int64_t panels, Chunk c, const Group *more) {
    static const float zeros[MOST_PANELS * PANEL];
    const int64_t width = least(panels * PANEL, p->out - panel * PANEL), step = product_words(p);
    const uint32_t *w = p->w + panel * step;
    const int is_whole = width == panels * PANEL;
    float sums[MOST_ROWS * PANEL], last_bias[PANEL] = {0.0f};
    const float *start = c.k ? NULL : p->bias ? p->bias + panel * PANEL : zeros;
    if (start && p->bias && !is_whole) start = memcpy(last_bias, start, width * sizeof(float));
    Group g = {.kind = p->kind, .panels = panels, .x = c.x, .x_stride = c.stride, .depth = c.depth,
               .w_row = panel_words(p->kind, 1), .w_step = step, .w = w + panel_words(p->kind, c.k), .start = start, .y_stride = is_whole ? p->out : PANEL,
               .parts = (rows + MOST_ROWS - 1) / MOST_ROWS};
    uint32_t room[EXPANDS_CODES ? CODE_DEPTH / 2 * PANEL : 1], *expanded = NULL;
    if (EXPANDS_CODES && IS_CODES(p->kind)) expand_codes(p->kind, w + code_words(p->kind, c.k), c.depth, expanded = room);
    Group then;
    if (more) then = *more, g.then = &then;
    for (int64_t done = 0; done < rows; done += g.rows, g.part++) {
        const Chunk own = rows_from(c, done);
        g.x = own.x;
        float *y = p->y + (row + done) * p->out + panel * PANEL;
        g.rows = rows_at_once(rows - done);
        g.y = is_whole ? y : sums;
        for (int64_t r = 0; !is_whole && r < g.rows; r++) {
            memcpy(sums + r * PANEL, y + r * p->out, width * sizeof(float));
            memset(sums + r * PANEL + width, 0, (PANEL - width) * sizeof(float));
        }
        if (more)
            then.x = more->x + done * more->x_stride, then.rows = g.rows, then.y = g.y, then.y_stride = g.y_stride;
        if (IS_CODES(p->kind)) multiply_groups(p, &g, &own, w, expanded);
        else multiply(&g);
        for (int64_t r = 0; !is_whole && r < g.rows; r++)
            memcpy(y + r * p->out, sums + r * PANEL, width * sizeof(float));
    }
}

#ifdef REAL_IS_BFLOAT16

/* The part of a run that meets a panel's columns; NULL: none. */
static const Part *part_of(const Run *run, int64_t panel) {
    for (const Part *part = run->parts; part < run->parts + MOST_JOINED; part++)
        if (part->b && part->column <= panel * PANEL && panel * PANEL < part->column + part->out) return part;
    return NULL;
}

/* True if neighbouring panels are the same linear layers' for every run. */
static int are_of_one_part(const Product *p, int64_t panel, int64_t panels) {
    for (const Run *run = p->runs; run < p->runs + p->num_runs; run++)
        if (part_of(run, panel) != part_of(run, panel + panels - 1)) return 0;
    return 1;
}

/* The last block of depth: the rows of each run go on with what its adapter adds. */
static void block_with_runs(const Product *p, int64_t row, int64_t rows, int64_t panel, int64_t panels, Chunk c) {
    uint32_t own[MOST_PANELS][MOST_RANK / 2 * PANEL];
    input room[sizeof(input) == sizeof(real) ? 1 : ROW_BLOCK * MOST_RANK];
    int64_t done = 0;
    for (const Run *run = p->runs; run < p->runs + p->num_runs; run++) {
        const Part *part = part_of(run, panel);
        const int64_t first = run->first > row ? run->first - row : 0, end = least(rows, run->first + run->rows - row);
        if (!part || first >= end) continue;
        if (done < first)
            block(p, row + done, first - done, panel, panels, rows_from(c, done), NULL);
        for (int64_t i = 0; i < panels; i++)
            pair_panel(part->b, part->rank, part->out, (panel + i) * PANEL - part->column, own[i]);
        const real *s = part->s + (row + first - run->first) * part->depth;
        int64_t stride = part->depth;
        const Group more = {.kind = p->kind, .panels = panels, .w = own[0], .w_row = PANEL,
                            .w_step = MOST_RANK / 2 * PANEL, .depth = part->depth,
                            .x = sizeof(input) == sizeof(real)
                                     ? (const input *)s
                                     : prepared(s, &stride, end - first, part->depth, room),
                            .x_stride = part->depth};
        block(p, row + first, end - first, panel, panels, rows_from(c, first), &more);
        done = end;
    }
    if (done < rows) block(p, row + done, rows - done, panel, panels, rows_from(c, done), NULL);
}

#else

static int are_of_one_part(const Product *p, int64_t panel, int64_t panels) { return (void)p, (void)panel, (void)panels, 1; }

static void block_with_runs(const Product *p, int64_t row, int64_t rows, int64_t panel, int64_t panels, Chunk c) {
    block(p, row, rows, panel, panels, c, NULL);
}

#endif

/* Panels first .. last by a chunk of depth. */
static void by_chunk(const Product *p, int64_t row, int64_t rows, int64_t first, int64_t last, Chunk c, int is_last) {
    const int64_t complete = p->out / PANEL, wide = panels_at_once(rows);
    for (int64_t panel = first, panels; panel < last; panel += panels) {
        panels = panel + wide <= least(last, complete) ? wide : 1;
        if (IS_CODES(p->kind)) panels = codes_at_once(wide, least(last, complete) - panel);
        if (p->num_runs && is_last) {
            if (!are_of_one_part(p, panel, panels)) panels = 1;
            block_with_runs(p, row, rows, panel, panels, c);
        } else block(p, row, rows, panel, panels, c, NULL);
    }
}

/* x in the order of the places of depth. */
static const real *gather(const Product *p, int64_t row, int64_t rows, int64_t k, int64_t depth, real *to) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < depth; i++) {
            const int32_t from = p->order[k + i];
            to[r * depth + i] = from < 0 ? (real)0 : p->x[(row + r) * p->x_stride + from];
        }
    return to;
}

/* `through` by codes: chunks are whole groups. */
__attribute__((noinline)) static void through_codes(const Product *p, int64_t row, int64_t rows, int64_t first,
                                                    int64_t last, input *room) {
    real gathered[ROW_BLOCK * CODE_DEPTH];
    float totals[ROW_BLOCK * (CODE_DEPTH / 8)];
    const int64_t most = CODE_DEPTH / p->group * p->group;
    for (int64_t k = 0, depth; k < p->depth; k += depth) {
        depth = least(most, p->depth - k);
        const real *x = p->x + row * p->x_stride + k;
        int64_t stride = p->x_stride;
        if (p->order) x = gather(p, row, rows, k, depth, gathered), stride = depth;
        const int64_t groups = (depth + p->group - 1) / p->group;
        for (int64_t r = 0; HAS_ZEROS(p->kind) && r < rows; r++)
            for (int64_t i = 0; i < groups; i++)
                totals[r * groups + i] = total_of(x + r * stride + i * p->group, least(p->group, depth - i * p->group));
        Chunk c = {.k = k, .depth = depth, .stride = stride, .totals = totals, .total_step = groups};
        c.x = prepared(x, &c.stride, rows, depth, room);
        by_chunk(p, row, rows, first, last, c, k + depth == p->depth);
    }
}

/* Panels first .. last by all of a depth. Depth that is no whole unit comes as a block of its own. */
static void through(const Product *p, int64_t row, int64_t rows, int64_t first, int64_t last, input *room) {
    const int64_t whole = p->in / DEPTH_UNIT * DEPTH_UNIT;
    for (int64_t k = 0, depth; k < p->in; k += depth) {
        depth = k < whole ? depth_at_once(rows, whole - k) : p->in - k;
        Chunk c = {.k = k, .depth = depth, .stride = p->x_stride};
        c.x = prepared(p->x + row * c.stride + k, &c.stride, rows, depth, room);
        by_chunk(p, row, rows, first, last, c, k + depth == p->in);
    }
}

__attribute__((noinline)) static void share(const Product *p, int64_t first, int64_t last) {
    input room[ROOM];
    for (int64_t row = 0; row < p->rows; row += ROW_BLOCK)
        for (int64_t panel = first; panel < last; panel += PANELS_IN_TURN)
            (IS_CODES(p->kind) ? through_codes : through)(p, row, least(ROW_BLOCK, p->rows - row), panel, least(last, panel + PANELS_IN_TURN), room);
}

#define DEPTH_PACKED 16 /* 4-byte words of each output's weights at a time: a cache line of float32 */

#ifdef REAL_IS_BFLOAT16

static uint32_t pack_panel(const real *w, int64_t out, int64_t in, int64_t panel, uint32_t *to, int64_t kind) {
    const int64_t pairs = panel_words(kind, in) / PANEL;
    for (int64_t start = 0; start < pairs; start += DEPTH_PACKED)
        for (int64_t c = 0; c < PANEL; c++) {
            const int64_t column = panel * PANEL + c;
            for (int64_t pair = start; pair < least(pairs, start + DEPTH_PACKED); pair++) {
                const real *from = w + column * in + 2 * pair;
                const uint32_t low = column < out && 2 * pair < in ? from[0] : 0;
                const uint32_t high = column < out && 2 * pair + 1 < in ? from[1] : 0;
                to[pair * PANEL + c] = low | high << 16;
            }
        }
    return 0;
}

#else

typedef uint32_t word __attribute__((may_alias)); /* the bits of a float */

/* One panel of w [out, in], zeros after the last output; which bits of a number the panel has no room for. */
static uint32_t pack_panel(const real *floats, int64_t out, int64_t in, int64_t panel, uint32_t *to, int64_t kind) {
    const word *w = (const word *)floats;
    uint32_t lost = 0;
    for (int64_t start = 0; start < in; start += DEPTH_PACKED) {
        const int64_t end = least(in, start + DEPTH_PACKED);
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int64_t low = panel * PANEL + lane, high = low + LANES;
            for (int64_t k = start; k < end; k++) {
                const word a = low < out ? w[low * in + k] : 0, b = high < out ? w[high * in + k] : 0;
                if (kind == PAIRS) {
                    lost |= (a | b) & 0xFFFF;
                    to[k * LANES + lane] = a >> 16 | (b & 0xFFFF0000);
                } else {
                    to[k * PANEL + lane] = a, to[k * PANEL + lane + LANES] = b;
                }
            }
        }
    }
    return lost;
}

#endif

/* Lay out w [out, in] in panels; 0, and panels of no use, if they have no room for every bit of it. */
int64_t pack(const real *w, int64_t out, int64_t in, uint32_t *panels, int64_t kind) {
    const int64_t count = (out + PANEL - 1) / PANEL, words = panel_words(kind, in);
    uint32_t lost = 0;
#pragma omp parallel reduction(| : lost)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int64_t panel = count * thread / threads; panel < count * (thread + 1) / threads && !lost; panel++)
            lost |= pack_panel(w, out, in, panel, panels + panel * words, kind);
    }
    return !lost;
}

static void multiply_all(const Product *product) {
    const int64_t panels = (product->out + PANEL - 1) / PANEL;
#pragma omp parallel
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const uint64_t before = begin_products();
        share(product, panels * thread / threads, panels * (thread + 1) / threads);
        end_products(before);
    }
}

void packed_linear(const real *x, int64_t x_stride, int64_t rows, int64_t in, const void *w, int64_t kind,
                   const float *bias, float *y, int64_t out) {
    multiply_all(&(Product){x, x_stride, rows, in, w, kind, bias, y, out, NULL, 0});
}

/* `order`, `group` and `depth`: see Product. */
void coded_linear(const real *x, int64_t x_stride, int64_t rows, int64_t in, const void *w, int64_t kind,
                  const float *bias, float *y, int64_t out, int64_t group, int64_t depth, const int32_t *order) {
    multiply_all(&(Product){x, x_stride, rows, in, w, kind, bias, y, out, NULL, 0, group, depth, order});
}
