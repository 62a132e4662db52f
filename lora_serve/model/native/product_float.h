/* Products of float32 inputs by panels of float32 numbers (FLOATS) or of bfloat16 ones widened in registers (PAIRS). */
typedef float input;
#include "product.h"

#define DEPTH_UNIT 1
#define DEPTH_BLOCK 1024
#define ROW_BLOCK 96
#define MOST_PANELS 4
#define PANELS_IN_TURN (INT64_MAX / 2) /* x is prepared once */
#define MOST_ROWS MAX_ROWS
#define ROOM 1

ALWAYS int64_t panel_words(int64_t kind, int64_t in) { return in * (kind == PAIRS ? LANES : PANEL); }
ALWAYS int64_t panels_at_once(int64_t rows) { return rows == 1 ? 4 : 1; } /* sums that hide an addition's latency */
ALWAYS int64_t depth_at_once(int64_t rows, int64_t left) { return (void)rows, least(DEPTH_BLOCK, left); }
ALWAYS int64_t rows_at_once(int64_t left) { return spread(left, MAX_ROWS); }
ALWAYS uint64_t begin_products(void) { return 0; }
ALWAYS void end_products(uint64_t before) { (void)before; }

ALWAYS const input *prepared(const real *x, int64_t *stride, int64_t rows, int64_t depth, input *room) {
    (void)stride, (void)rows, (void)depth, (void)room;
    return x;
}

DEFINE_CODES(by_nibbles, NIBBLES, 0)
DEFINE_CODES(by_bytes, BYTES, 0)
DEFINE_CODES(by_float8s, FLOAT8S, 0)

#define EXPANDS_CODES 0
ALWAYS int64_t codes_at_once(int64_t wide, int64_t left) { return left >= wide ? wide : 1; }

static void multiply_codes(const Group *g) {
    (FORM(g->kind) == NIBBLES ? by_nibbles : FORM(g->kind) == BYTES ? by_bytes : by_float8s)(g);
}

static void multiply(const Group *g) {
    begin(g);
    if (g->panels == 1)
        (g->kind == PAIRS ? rows_of_pairs : rows_of_floats)(g->rows, g->x, g->x_stride, g->w, g->w_row, g->depth, g->y,
                                                            g->y_stride);
    else if (g->kind == PAIRS) tile(PAIRS, 1, 4, g->x, 0, g->w, LANES, g->w_step, g->depth, g->y, 0);
    else tile(FLOATS, 1, 4, g->x, 0, g->w, g->w_row, g->w_step, g->depth, g->y, 0);
}
