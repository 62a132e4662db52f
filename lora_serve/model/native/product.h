/* What products of every order and type share. Included where `input`, the type of x as a product reads it, is known. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "tile.h"

#include "codes.h"

typedef struct Group { /* some rows of x to be multiplied by some neighbouring panels */
    int64_t kind, rows, panels;
    const input *x;
    int64_t x_stride;
    const uint32_t *w;
    int64_t w_row, w_step, depth; /* words from row to row (of float32: others have whole panels) and from panel to panel */
    const float *start;    /* the sums' beginning, the same for every row; NULL: they go on from y */
    float *y;
    int64_t y_stride, part, parts; /* which it is of the parts of x that this part of the panels meets; 0: panels lie near */
    const struct Group *then; /* another product that goes on with these sums; NULL: none */
    Beside beside;            /* of codes, whose depth is some groups */
} Group;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The first of as few parts as `left` rows make, `most` or fewer each, and all alike. */
static inline int64_t spread(int64_t left, int64_t most) {
    const int64_t parts = (left + most - 1) / most;
    return (left + parts - 1) / parts;
}

ALWAYS void begin(const Group *g) {
    for (int64_t r = 0; g->start && r < g->rows; r++)
        for (int64_t c = 0; c < g->panels * PANEL; c += LANES) store(g->y + r * g->y_stride + c, load(g->start + c));
}

/* Groups of codes by x as floats: by four panels of one row, or by one. */
#define CODE_CASE(form, odd_first, rows, panels)                                                                        \
    case rows:                                                                                                          \
        code_tile(form, rows, panels, odd_first, (const float *)g->x, g->x_stride, g->w, g->w_step, g->depth, &g->beside, \
                  g->y, g->y_stride);                                                                                   \
        return;
#if MAX_ROWS == 12
#define MORE_CODES(form, odd_first)                                                                         \
    CODE_CASE(form, odd_first, 7, 1) CODE_CASE(form, odd_first, 8, 1) CODE_CASE(form, odd_first, 9, 1)      \
    CODE_CASE(form, odd_first, 10, 1) CODE_CASE(form, odd_first, 11, 1) CODE_CASE(form, odd_first, 12, 1)
#else
#define MORE_CODES(form, odd_first)
#endif
#define DEFINE_CODES(name, form, odd_first)                                                                    \
    APART static void name(const Group *g) {                                                                   \
        if (g->panels == 4)                                                                                    \
            switch (1) { CODE_CASE(form, odd_first, 1, 4) }                                                    \
        switch (g->rows) {                                                                                     \
            CODE_CASE(form, odd_first, 1, 1) CODE_CASE(form, odd_first, 2, 1) CODE_CASE(form, odd_first, 3, 1) \
            CODE_CASE(form, odd_first, 4, 1) CODE_CASE(form, odd_first, 5, 1) CODE_CASE(form, odd_first, 6, 1) \
            MORE_CODES(form, odd_first)                                                                        \
        }                                                                                                      \
    }

/* x with zeros after `depth`, up to a whole unit. */
ALWAYS const real *padded(const real *x, int64_t *stride, int64_t rows, int64_t depth, int64_t unit, real *room) {
    for (int64_t r = 0; r < rows; r++) {
        memcpy(room + r * unit, x + r * *stride, depth * sizeof(real));
        memset(room + r * unit + depth, 0, (unit - depth) * sizeof(real));
    }
    *stride = unit;
    return room;
}

#endif
