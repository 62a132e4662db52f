/* Products of float32 inputs by panels of float32 numbers (FLOATS) or of bfloat16 ones widened in registers (PAIRS). */
#include "tile.h"

#define DEPTH_UNIT 1
#define DEPTH_BLOCK 1024
#define ROW_BLOCK 96
#define MOST_PANELS 4
#define MOST_ROWS MAX_ROWS
#define ROOM 1

typedef float input;

ALWAYS int64_t panel_words(int64_t kind, int64_t in) { return in * (kind == PAIRS ? LANES : PANEL); }
ALWAYS int64_t panels_at_once(int64_t rows) { return rows == 1 ? 4 : 1; } /* sums that hide an addition's latency */
ALWAYS int64_t rows_at_once(int64_t left) { return spread(left, MAX_ROWS); }
ALWAYS uint64_t begin_products(void) { return 0; }
ALWAYS void end_products(uint64_t before) { (void)before; }

ALWAYS const input *prepared(const real *x, int64_t *stride, int64_t rows, int64_t depth, input *room) {
    (void)stride, (void)rows, (void)depth, (void)room;
    return x;
}

static void multiply(int64_t kind, int64_t rows, int64_t panels, const input *x, int64_t x_stride, const void *w,
                     int64_t w_step, int64_t depth, const float *start, float *y, int64_t y_stride) {
    begin(start, rows, panels * PANEL, y, y_stride);
    if (kind == PAIRS) {
        if (panels == 1) rows_of_pairs(rows, x, x_stride, w, LANES, depth, y, y_stride);
        else tile(PAIRS, 1, 4, x, 0, w, LANES, w_step, depth, y, 0);
    } else {
        if (panels == 1) rows_of_floats(rows, x, x_stride, w, PANEL, depth, y, y_stride);
        else tile(FLOATS, 1, 4, x, 0, w, PANEL, w_step, depth, y, 0);
    }
}
