/* Products of bfloat16 inputs by panels of DEPTH_PAIRS, in the order of TDPBF16PS: for each 32 of k
 *
 *     even = 0, odd = 0;  for each pair: even = fma(x[k], w[k], even), odd = fma(x[k + 1], w[k + 1], odd)
 *     sum = sum + (even + odd)
 *
 * each operation rounded once to the nearest, denormal numbers taken as 0 going in and coming out. By the tiles of AMX,
 * for every number of rows, or by the same arithmetic on widened numbers. After `in` come zeros up to a whole block.
 */
typedef real input;
#include "flushing.h"
#include "product.h"

#define DEPTH_UNIT 32
#define ROOM (ROW_BLOCK * DEPTH_UNIT) /* the last numbers of rows that are no whole blocks */

ALWAYS int64_t panel_words(int64_t kind, int64_t in) { return (void)kind, (in + 31) / 32 * 16 * PANEL; }

ALWAYS const input *prepared(const real *x, int64_t *stride, int64_t rows, int64_t depth, input *room) {
    return depth % DEPTH_UNIT == 0 ? x : padded(x, stride, rows, depth, DEPTH_UNIT, room);
}

#if defined(__AMX_BF16__) && !defined(BFLOAT16_ORDER_BLOCKS)
#include <immintrin.h>

#define TILE_ROWS 16
#define MOST_PANELS 2
#define PANELS_IN_TURN 2 /* by all of the depth: their sums stay near */
#define MOST_ROWS (2 * TILE_ROWS)
#define ROW_BLOCK 256
#define DEPTH_BLOCK 256
#define BLOCK (DEPTH_UNIT / 2 * PANEL) /* words of a block of a panel */
#define LINES (4 * BLOCK / 64)
#define AHEAD 4096 /* bytes of weights asked for before they are multiplied by */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShapes;

static __thread int64_t shaped_for; /* rows; 0: no tiles are in use */

/* Sums in tiles 0 to 3, x in 4 and 5 (the rows after the first 16), weights in 6 and 7. */
static void shape_tiles(int64_t rows) {
    if (rows == shaped_for) return;
    const uint8_t first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows - first;
    TileShapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = t >= 6 ? 16 : second && (t == 2 || t == 3 || t == 5) ? second : first;
    }
    _tile_loadconfig(&shapes);
    shaped_for = rows;
}

ALWAYS int64_t panels_at_once(int64_t rows) { return (void)rows, 2; }
ALWAYS int64_t depth_at_once(int64_t rows, int64_t left) {
    return rows <= MOST_ROWS ? left : (spread(left, DEPTH_BLOCK) + DEPTH_UNIT - 1) / DEPTH_UNIT * DEPTH_UNIT;
}
ALWAYS int64_t rows_at_once(int64_t left) { return left < MOST_ROWS ? left : MOST_ROWS; }
ALWAYS uint64_t begin_products(void) {
    shaped_for = 0;
    return flush_denormals(); /* tiles do always; what stands between products shall at every level as well */
}
ALWAYS void end_products(uint64_t before) {
    _tile_release();
    restore_denormals(before);
}

/* One block of depth: x by `halves` times 16 rows, weights of one panel or of two. */
ALWAYS void step(const int halves, const int panels, const Group *g, const input *x, const uint32_t *w,
                 const uint32_t *next) {
    _tile_loadd(4, x, 2 * g->x_stride);
    _tile_loadd(6, w, 4 * PANEL);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 16, 4 * PANEL);
    _tile_dpbf16ps(1, 4, 7);
    if (halves == 2) {
        _tile_loadd(5, x + TILE_ROWS * g->x_stride, 2 * g->x_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    if (panels == 2) {
        _tile_loadd(6, next, 4 * PANEL);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, next + 16, 4 * PANEL);
        _tile_dpbf16ps(3, 4, 7);
    }
}

/* Panel number `panel`, or that and the next, by up to 16 rows or, of one panel, up to 32. */
ALWAYS void tiles(const int halves, const int panels, const Group *g, int64_t panel) {
    const uint32_t *w = g->w + panel * g->w_step, *next = w + (panels == 2 ? g->w_step : 0);
    const input *x = g->x;
    float *y = g->y + panel * PANEL;
    const int64_t second = halves == 2 ? TILE_ROWS * g->y_stride : PANEL, bytes = 4 * g->y_stride;
    const float *from = g->start ? g->start + panel * PANEL : y, *other = from + (g->start && halves == 2 ? 0 : second);
    const int64_t apart = g->start ? 0 : bytes;
    /* Lines of each block that this group asks for ahead: those of the panels after its own, shared by the parts. */
    const int64_t parts = g->parts ? g->parts : LINES + 1; /* 0: nothing is asked for */
    const int64_t first = LINES * g->part / parts, last = LINES * (g->part + 1) / parts;
    const char *ahead = (const char *)(halves == 2 ? w + g->panels * g->w_step : w) + 64 * first;
    __asm__ volatile("" ::: "memory"); /* the compiler's own loads of tiles do not say that they read */
    _tile_loadd(0, from, apart);
    _tile_loadd(1, from + 16, apart);
    if (halves * panels == 2) {
        _tile_loadd(2, other, apart);
        _tile_loadd(3, other + 16, apart);
    }
    for (int64_t k = 0; k < g->depth; k += DEPTH_UNIT, x += DEPTH_UNIT, w += BLOCK, next += BLOCK, ahead += 4 * BLOCK) {
        step(halves, panels, g, x, w, next);
        for (int64_t line = first; halves == 2 && line < last; line++)
            __builtin_prefetch(ahead + 64 * (line - first), 0, 2);
        if (halves == 1 && g->parts)
            for (int64_t line = 0; line < LINES; line++) {
                __builtin_prefetch((const char *)w + AHEAD + 64 * line);
                if (panels == 2) __builtin_prefetch((const char *)next + AHEAD + 64 * line);
            }
    }
    for (const Group *more = g->then; more; more = more->then) {
        const uint32_t *own = more->w + panel * more->w_step;
        for (int64_t k = 0; k < more->depth; k += DEPTH_UNIT, own += BLOCK)
            step(halves, panels, more, more->x + k, own, own + (panels == 2 ? more->w_step : 0));
    }
    _tile_stored(0, y, bytes);
    _tile_stored(1, y + 16, bytes);
    if (halves * panels == 2) {
        _tile_stored(2, y + second, bytes);
        _tile_stored(3, y + second + 16, bytes);
    }
}

static void multiply(const Group *g) {
    shape_tiles(g->rows);
    for (int64_t panel = 0; panel < g->panels;)
        if (g->rows > TILE_ROWS) tiles(2, 1, g, panel++);
        else if (panel + 1 < g->panels) tiles(1, 2, g, panel), panel += 2;
        else tiles(1, 1, g, panel++);
}

#else

#define MOST_PANELS 1
#define PANELS_IN_TURN 1
#define MOST_ROWS 1
#define ROW_BLOCK 96

ALWAYS int64_t panels_at_once(int64_t rows) { return (void)rows, 1; }
ALWAYS int64_t depth_at_once(int64_t rows, int64_t left) { return (void)rows, left; }
ALWAYS int64_t rows_at_once(int64_t left) { return (void)left, 1; }
ALWAYS uint64_t begin_products(void) { return flush_denormals(); }
ALWAYS void end_products(uint64_t before) { restore_denormals(before); }

static void multiply(const Group *g) {
    begin(g);
    for (int64_t k = 0; k < g->depth; k += DEPTH_UNIT)
        for (int64_t c = 0; c < PANEL; c += LANES) {
            vec even = {}, odd = {};
            for (int64_t i = k; i < k + DEPTH_UNIT; i += 2) {
                const bits pair = *(const bits *)(g->w + i / 2 * PANEL + c);
                even += splat(float_of(g->x[i])) * (vec)(pair << 16);
                odd += splat(float_of(g->x[i + 1])) * (vec)(pair & 0xffff0000u);
            }
            store(g->y + c, load(g->y + c) + (even + odd));
        }
    if (g->then) multiply(g->then);
}

#endif

#define EXPANDS_CODES 1 /* before they are multiplied by */
ALWAYS int64_t codes_at_once(int64_t wide, int64_t left) { return (void)wide, (void)left, 1; }

/* x by each group of expanded codes from 0 on, and then added. */
static void multiply_codes(const Group *g) {
    static const float zeros[PANEL];
    float sums[MOST_ROWS * PANEL];
    EACH_GROUP(&g->beside, g->depth) {
        const Group of_codes = {.kind = DEPTH_PAIRS, .rows = g->rows, .panels = 1, .x = g->x + k, .x_stride = g->x_stride,
                                .w = g->w + k / 2 * PANEL, .w_row = PANEL, .depth = end - k, .start = zeros, .y = sums,
                                .y_stride = PANEL};
        multiply(&of_codes);
        Beside beside = g->beside;
        for (int64_t r = 0; r < g->rows; r++, beside.totals += beside.total_step) {
            vec sum[1][8] = {{load(sums + r * PANEL), load(sums + r * PANEL + LANES)}};
            add_group(&beside, i, 1, 1, sum, g->y + r * g->y_stride, 0);
        }
        k = end;
    }
}
