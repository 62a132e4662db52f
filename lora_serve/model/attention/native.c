/* Attention of one query token per row over a paged KV cache, read where it lies: nothing is gathered, nothing padded.
 *
 *     out[i, h] = sum_p softmax_p(cap(scale * q[i, h] . k[p, g])) v[p, g]     over row i's visible positions p,
 *
 * g being the KV head of query head h, and cap(s) = softcap * tanh(s / softcap) if softcap > 0, else s. Visible are
 * the last `window` positions (all, if window is 0). Scores are taken a block of positions at a time with a running
 * maximum (online softmax: Milakov & Gimelshein, 2018, arXiv 1805.02867). Everything is float32 and contiguous:
 *
 *     q, out [rows, num_kv_heads, group, head_dim]     keys, values [num_blocks, block_size, num_kv_heads, head_dim]
 *     table [rows, width] blocks of each row           lengths [rows] positions, the query's own included
 */
#include <math.h>
#include <stdint.h>

#define MAX_GROUP 64
#define CHUNK 64

static void attend_group(const float *restrict q, float *restrict out, int64_t group, int64_t head_dim,
                         const float *keys, const float *values, int64_t token_stride, int64_t block_size,
                         const int64_t *table, int64_t first, int64_t length, float scale, float softcap) {
    float maximum[MAX_GROUP], total[MAX_GROUP], score[MAX_GROUP][CHUNK];
    for (int64_t g = 0; g < group; g++) {
        maximum[g] = -INFINITY;
        total[g] = 0.0f;
        for (int64_t d = 0; d < head_dim; d++) out[g * head_dim + d] = 0.0f;
    }
    for (int64_t start = first; start < length; start += CHUNK) {
        const int64_t count = length - start < CHUNK ? length - start : CHUNK;
        int64_t place[CHUNK];
        for (int64_t p = 0; p < count; p++) {
            const int64_t position = start + p;
            place[p] = (table[position / block_size] * block_size + position % block_size) * token_stride;
        }
        for (int64_t p = 0; p < count; p++) {
            const float *restrict k = keys + place[p];
            for (int64_t g = 0; g < group; g++) {
                const float *restrict qg = q + g * head_dim;
                float sum = 0.0f;
                for (int64_t d = 0; d < head_dim; d++) sum += qg[d] * k[d];
                sum *= scale;
                score[g][p] = softcap > 0.0f ? softcap * tanhf(sum / softcap) : sum;
            }
        }
        for (int64_t g = 0; g < group; g++) {
            float highest = maximum[g];
            for (int64_t p = 0; p < count; p++)  /* !(a <= b) is true for NaN, which must not be lost */
                if (!(score[g][p] <= highest)) highest = score[g][p];
            const float shrink = maximum[g] == highest ? 1.0f : expf(maximum[g] - highest);
            float sum = 0.0f;
            for (int64_t p = 0; p < count; p++) sum += score[g][p] = expf(score[g][p] - highest);
            total[g] = total[g] * shrink + sum;
            maximum[g] = highest;
            if (shrink != 1.0f)
                for (int64_t d = 0; d < head_dim; d++) out[g * head_dim + d] *= shrink;
        }
        for (int64_t p = 0; p < count; p++) {
            const float *restrict v = values + place[p];
            for (int64_t g = 0; g < group; g++) {
                const float weight = score[g][p];
                float *restrict o = out + g * head_dim;
                for (int64_t d = 0; d < head_dim; d++) o[d] += weight * v[d];
            }
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t d = 0; d < head_dim; d++) out[g * head_dim + d] /= total[g];
}

void attend_decode(const float *q, float *out, int64_t rows, int64_t num_kv_heads, int64_t group, int64_t head_dim,
                   const float *keys, const float *values, int64_t block_size, const int64_t *table, int64_t width,
                   const int64_t *lengths, int64_t window, float scale, float softcap) {
#pragma omp parallel for schedule(dynamic, 1) if (rows * num_kv_heads > 1)
    for (int64_t item = 0; item < rows * num_kv_heads; item++) {
        const int64_t row = item / num_kv_heads, head = item % num_kv_heads;
        const int64_t first = window > 0 && lengths[row] > window ? lengths[row] - window : 0;
        attend_group(q + item * group * head_dim, out + item * group * head_dim, group, head_dim,
                     keys + head * head_dim, values + head * head_dim, num_kv_heads * head_dim, block_size,
                     table + row * width, first, lengths[row], scale, softcap);
    }
}
