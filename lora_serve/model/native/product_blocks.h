/* Products of bfloat16 inputs by panels of DEPTH_PAIRS, in the order of TDPBF16PS: for each 32 of k
 *
 *     even = 0, odd = 0;  for each pair: even = fma(x[k], w[k], even), odd = fma(x[k + 1], w[k + 1], odd)
 *     sum = sum + (even + odd)
 *
 * each operation rounded once to the nearest, denormal numbers taken as 0 going in and coming out. By the tiles of AMX,
 * for every number of rows, or by the same arithmetic on widened numbers. After `in` come zeros up to a whole block.
 */
#include "tile.h"

#define DEPTH_UNIT 32
#define ROOM (ROW_BLOCK * DEPTH_UNIT) /* the last numbers of rows that are no whole blocks */

typedef real input;

ALWAYS int64_t panel_words(int64_t kind, int64_t in) { return (void)kind, (in + 31) / 32 * 16 * PANEL; }

ALWAYS const input *prepared(const real *x, int64_t *stride, int64_t rows, int64_t depth, input *room) {
    return depth % DEPTH_UNIT == 0 ? x : padded(x, stride, rows, depth, DEPTH_UNIT, room);
}

#if defined(__AMX_BF16__) && !defined(BFLOAT16_ORDER_BLOCKS)
#include <immintrin.h>

#define TILE_ROWS 16
#define MOST_PANELS 4
#define MOST_ROWS (2 * TILE_ROWS)
#define ROW_BLOCK 384
#define DEPTH_BLOCK 4096
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

ALWAYS int64_t panels_at_once(int64_t rows) { return rows <= TILE_ROWS ? 2 : 4; } /* 4: while their rows are near */
ALWAYS int64_t rows_at_once(int64_t left) { return left < MOST_ROWS ? left : MOST_ROWS; }
ALWAYS uint64_t begin_products(void) { return shaped_for = 0; }
ALWAYS void end_products(uint64_t before) {
    (void)before;
    _tile_release();
}

/* Two groups of rows by one panel, or one group by one or two. */
ALWAYS void tiles(const int groups, const int panels, const input *x, int64_t x_stride, const uint32_t *w,
                  int64_t w_step, int64_t depth, const float *start, float *y, int64_t y_stride) {
    const int64_t block = 16 * PANEL, second = groups == 2 ? TILE_ROWS * y_stride : PANEL, bytes = 4 * y_stride;
    const float *from = start ? start : y, *other = from + (start && groups == 2 ? 0 : second);
    const int64_t apart = start ? 0 : bytes;
    __asm__ volatile("" ::: "memory"); /* the compiler's own loads of tiles do not say that they read */
    _tile_loadd(0, from, apart);
    _tile_loadd(1, from + 16, apart);
    if (groups * panels == 2) {
        _tile_loadd(2, other, apart);
        _tile_loadd(3, other + 16, apart);
    }
    for (int64_t k = 0; k < depth; k += DEPTH_UNIT, x += DEPTH_UNIT, w += block) {
        _tile_loadd(4, x, 2 * x_stride);
        _tile_loadd(6, w, 4 * PANEL);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 16, 4 * PANEL);
        _tile_dpbf16ps(1, 4, 7);
        if (groups == 2) {
            _tile_loadd(5, x + TILE_ROWS * x_stride, 2 * x_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (panels == 2) {
            _tile_loadd(6, w + w_step, 4 * PANEL);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w + w_step + 16, 4 * PANEL);
            _tile_dpbf16ps(3, 4, 7);
        }
        if (groups == 1)
            UNROLL for (int p = 0; p < panels; p++)
                for (int line = 0; line < 4 * block; line += 64)
                    __builtin_prefetch((const char *)(w + p * w_step) + AHEAD + line);
    }
    _tile_stored(0, y, bytes);
    _tile_stored(1, y + 16, bytes);
    if (groups * panels == 2) {
        _tile_stored(2, y + second, bytes);
        _tile_stored(3, y + second + 16, bytes);
    }
}

static void multiply(int64_t kind, int64_t rows, int64_t panels, const input *x, int64_t x_stride, const void *w,
                     int64_t w_step, int64_t depth, const float *start, float *y, int64_t y_stride) {
    (void)kind;
    shape_tiles(rows);
    if (rows > TILE_ROWS)
        for (int64_t p = 0; p < panels; p++)
            tiles(2, 1, x, x_stride, (const uint32_t *)w + p * w_step, 0, depth, start ? start + p * PANEL : NULL,
                  y + p * PANEL, y_stride);
    else if (panels == 2) tiles(1, 2, x, x_stride, w, w_step, depth, start, y, y_stride);
    else tiles(1, 1, x, x_stride, w, w_step, depth, start, y, y_stride);
}

#else
#include "flushing.h"

#define MOST_PANELS 1
#define MOST_ROWS 1
#define ROW_BLOCK 96
#define DEPTH_BLOCK 1024

ALWAYS int64_t panels_at_once(int64_t rows) { return (void)rows, 1; }
ALWAYS int64_t rows_at_once(int64_t left) { return (void)left, 1; }
ALWAYS uint64_t begin_products(void) { return flush_denormals(); }
ALWAYS void end_products(uint64_t before) { restore_denormals(before); }

static void multiply(int64_t kind, int64_t rows, int64_t panels, const input *x, int64_t x_stride, const void *w,
                     int64_t w_step, int64_t depth, const float *start, float *y, int64_t y_stride) {
    (void)kind, (void)x_stride, (void)w_step;
    begin(start, rows, panels * PANEL, y, y_stride);
    for (int64_t k = 0; k < depth; k += DEPTH_UNIT)
        for (int64_t c = 0; c < PANEL; c += LANES) {
            vec even = {}, odd = {};
            for (int64_t i = k; i < k + DEPTH_UNIT; i += 2) {
                const bits pair = *(const bits *)((const uint32_t *)w + i / 2 * PANEL + c);
                even += splat(float_of(x[i])) * (vec)(pair << 16);
                odd += splat(float_of(x[i + 1])) * (vec)(pair & 0xffff0000u);
            }
            store(y + c, load(y + c) + (even + odd));
        }
}

#endif
