/* y = x W^T + bias for a frozen weight W [out, in] that was laid out once, in panels of PANEL outputs:
 * [panels][in][PANEL] float32, or the same in bfloat16 in half the bytes (see PAIRS), widened in registers.
 *
 * x [rows, in] and y [rows, out] are float32. Depth is cut so that a panel's part and MAX_ROWS rows of x stay in the
 * first cache, rows so that their part of x stays in the second; threads share the panels.
 */
#include "threads.h"
#include "tile.h"

#define DEPTH_BLOCK 1024
#define ROW_BLOCK 96
#define WIDE 4 /* panels at once for one row: enough sums to hide the latency of an addition */

typedef struct {
    const float *x;
    int64_t x_stride, rows, in;
    const void *w;
    int64_t w_words; /* 4-byte words per panel row */
    const float *bias;
    float *y;
    int64_t out;
} Product;

int64_t lanes(void) { return LANES; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void begin(const Product *p, int64_t panel, int64_t width, float *y) {
    if (p->bias) memcpy(y, p->bias + panel * PANEL, width * sizeof(float));
    else memset(y, 0, width * sizeof(float));
}

static void one_row(const Product *p, int64_t row, int64_t first, int64_t last, int64_t k, int64_t depth) {
    const float *x = p->x + row * p->x_stride + k;
    int64_t panel = first;
    for (; panel + WIDE <= last; panel += WIDE) {
        float *y = p->y + row * p->out + panel * PANEL;
        const float *w = (const float *)p->w + (panel * p->in + k) * p->w_words;
        if (k == 0) begin(p, panel, WIDE * PANEL, y);
        if (p->w_words == LANES) tile(PAIRS, 1, WIDE, x, 0, w, LANES, p->in * LANES, depth, y, 0);
        else tile(FLOATS, 1, WIDE, x, 0, w, PANEL, p->in * PANEL, depth, y, 0);
    }
    for (; panel < last; panel++) {
        float *y = p->y + row * p->out + panel * PANEL;
        const float *w = (const float *)p->w + (panel * p->in + k) * p->w_words;
        if (k == 0) begin(p, panel, PANEL, y);
        (p->w_words == LANES ? rows_of_pairs : rows_of_floats)(1, x, 0, w, p->w_words, depth, y, 0);
    }
}

/* Rows first .. first + rows times one panel; an incomplete last panel goes through a buffer. */
static void block(const Product *p, int64_t first, int64_t rows, int64_t panel, int64_t k, int64_t depth) {
    const int64_t width = least(PANEL, p->out - panel * PANEL);
    const int64_t groups = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const float *w = (const float *)p->w + (panel * p->in + k) * p->w_words;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t row = first + rows * g / groups, end = first + rows * (g + 1) / groups;
        const float *x = p->x + row * p->x_stride + k;
        float *y = p->y + row * p->out + panel * PANEL, buffer[MAX_ROWS * PANEL];
        const int64_t stride = width == PANEL ? p->out : PANEL;
        float *sums = width == PANEL ? y : buffer;
        for (int64_t r = 0; r < end - row; r++) {
            if (k == 0) begin(p, panel, width, sums + r * stride);
            else if (sums == buffer) memcpy(sums + r * stride, y + r * p->out, width * sizeof(float));
            if (width < PANEL) memset(sums + r * stride + width, 0, (PANEL - width) * sizeof(float));
        }
        (p->w_words == LANES ? rows_of_pairs : rows_of_floats)(end - row, x, p->x_stride, w, p->w_words, depth, sums, stride);
        if (sums == buffer)
            for (int64_t r = 0; r < end - row; r++) memcpy(y + r * p->out, buffer + r * PANEL, width * sizeof(float));
    }
}

static void share(const Product *p, int64_t first, int64_t last) {
    for (int64_t row = 0; row < p->rows; row += ROW_BLOCK) {
        const int64_t rows = least(ROW_BLOCK, p->rows - row);
        for (int64_t k = 0; k < p->in; k += DEPTH_BLOCK) {
            const int64_t depth = least(DEPTH_BLOCK, p->in - k);
            int64_t panel = first;
            if (rows == 1) {
                panel = least(last, p->out / PANEL);
                one_row(p, row, first, panel, k, depth);
            }
            for (; panel < last; panel++) block(p, row, rows, panel, k, depth);
        }
    }
}

typedef uint32_t word __attribute__((may_alias)); /* the bits of a float */

#define DEPTH_PACKED 16 /* a cache line of each output's weights at a time */

/* One panel of w [out, in], zeros after the last output; which bits of a number bfloat16 has no room for. */
static word pack_panel(const word *w, int64_t out, int64_t in, int64_t panel, word *to, int64_t is_bfloat16) {
    word lost = 0;
    for (int64_t start = 0; start < in; start += DEPTH_PACKED) {
        const int64_t end = least(in, start + DEPTH_PACKED);
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int64_t low = panel * PANEL + lane, high = low + LANES;
            for (int64_t k = start; k < end; k++) {
                const word a = low < out ? w[low * in + k] : 0, b = high < out ? w[high * in + k] : 0;
                if (is_bfloat16) {
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

/* Lay out w [out, in] in panels; 0, and panels of no use, if it should be bfloat16 and a number of it is not. */
int64_t pack(const float *w, int64_t out, int64_t in, void *panels, int64_t is_bfloat16) {
    const int64_t count = (out + PANEL - 1) / PANEL, words = in * (is_bfloat16 ? LANES : PANEL);
    word lost = 0;
#pragma omp parallel reduction(| : lost)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int64_t panel = count * thread / threads; panel < count * (thread + 1) / threads && !lost; panel++)
            lost |= pack_panel((const word *)w, out, in, panel, (word *)panels + panel * words, is_bfloat16);
    }
    return !lost;
}

void packed_linear(const float *x, int64_t x_stride, int64_t rows, int64_t in, const void *w, int64_t is_bfloat16,
                   const float *bias, float *y, int64_t out) {
    const Product product = {x, x_stride, rows, in, w, is_bfloat16 ? LANES : PANEL, bias, y, out};
    const int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        share(&product, panels * thread / threads, panels * (thread + 1) / threads);
    }
}
