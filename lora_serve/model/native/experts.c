/* A mixture of experts (arXiv 1701.06538), all of a step's tokens in one call:
 *
 *     y[t] = sum over k of weight[t][k] * (down_e act(gate_up_e x[t])),   e = chosen[t][k]
 *
 * Pairs of a token and an expert are sorted by expert, so that each expert's weights are read once; the products are
 * those of packed_linear.c, whose bits do not depend on the number of rows. Inputs of products are rounded once, sums
 * stay float until a token's k experts are added up, in the order in which they were chosen.
 */

typedef struct { /* panels of all experts one after the other, so many words apart; biases [count][out], NULL: none */
    const void *up_panels, *down_panels;
    int64_t up_kind, down_kind, up_words, down_words, hidden, inner, count, activation;
    const float *up_bias, *down_bias;
    float alpha, limit, offset;
} Experts;

typedef struct {
    int64_t *first;     /* [count + 1], where each expert's pairs begin */
    int64_t *pair;      /* sorted place -> pair */
    int64_t *place;     /* pair -> sorted place; -1: no expert */
    real *x, *inner;    /* [pairs][hidden], [pairs][inner], sorted */
    float *up, *down;   /* [pairs][2 * inner], [pairs][hidden] */
} Sorted;

/* Returns the bytes of all that lies between, `from` on. */
static int64_t lay_out_pairs(const Experts *e, int64_t pairs, char *from, Sorted *s) {
    int64_t used = 0;
    s->first = take(from, &used, (e->count + 1) * sizeof(int64_t));
    s->pair = take(from, &used, pairs * sizeof(int64_t));
    s->place = take(from, &used, pairs * sizeof(int64_t));
    s->x = take(from, &used, pairs * e->hidden * sizeof(real));
    s->inner = take(from, &used, pairs * e->inner * sizeof(real));
    s->up = take(from, &used, 2 * pairs * e->inner * sizeof(float));
    s->down = take(from, &used, pairs * e->hidden * sizeof(float));
    return used;
}

int64_t experts_room(const Experts *e, int64_t pairs) {
    Sorted sorted;
    return lay_out_pairs(e, pairs, NULL, &sorted) + 64;
}

/* Returns how many pairs have an expert. */
static int64_t sort_pairs(const Experts *e, const int64_t *chosen, int64_t pairs, const Sorted *s) {
    memset(s->first, 0, (e->count + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < pairs; i++)
        if (0 <= chosen[i] && chosen[i] < e->count) s->first[chosen[i] + 1]++;
    for (int64_t i = 0; i < e->count; i++) s->first[i + 1] += s->first[i];
    for (int64_t i = 0; i < pairs; i++) {
        s->place[i] = -1;
        if (0 <= chosen[i] && chosen[i] < e->count) s->pair[s->place[i] = s->first[chosen[i]]++] = i;
    }
    for (int64_t i = e->count; i > 0; i--) s->first[i] = s->first[i - 1];
    s->first[0] = 0;
    return s->first[e->count];
}

/* One expert's rows by a part of its panels. `all`: the product of expert 0, its x and y of all pairs. */
static void multiply_part(const Product *all, int64_t words, const Sorted *s, int64_t expert, int64_t part, int64_t parts) {
    const int64_t first = s->first[expert], rows = s->first[expert + 1] - first;
    const int64_t panels = (all->out + PANEL - 1) / PANEL;
    if (rows == 0) return;
    Product own = *all;
    own.rows = rows;
    own.x += first * all->in, own.y += first * all->out, own.w += expert * words;
    if (own.bias) own.bias += expert * all->out;
    share(&own, panels * part / parts, panels * (part + 1) / parts);
}

/* x [tokens, hidden], chosen and weights [tokens, top_k] -> y [tokens, hidden]; an expert that is none adds nothing. */
void experts(const Experts *e, const real *x, int64_t tokens, const int64_t *chosen, const float *weights, int64_t top_k,
             char *room, real *y) {
    const int64_t pairs = tokens * top_k, hidden = e->hidden, inner = e->inner;
    const Clamps clamps = {e->alpha, e->limit, e->offset};
    Sorted sorted, *const s = &sorted;
    lay_out_pairs(e, pairs, room + (64 - (uintptr_t)room % 64) % 64, s);
    const int64_t found = sort_pairs(e, chosen, pairs, s);
    int64_t active = 0;
    for (int64_t i = 0; i < e->count; i++) active += s->first[i] < s->first[i + 1];
    const int64_t wanted = 4 * omp_get_max_threads(), parts = active && active < wanted ? (wanted + active - 1) / active : 1;
    const Product up = {s->x, hidden, 0, hidden, e->up_panels, e->up_kind, e->up_bias, s->up, 2 * inner, NULL, 0};
    const Product down = {s->inner, inner, 0, inner, e->down_panels, e->down_kind, e->down_bias, s->down, hidden, NULL, 0};
#pragma omp parallel
    {
        const uint64_t before = begin_products();
#pragma omp for
        for (int64_t i = 0; i < found; i++)
            memcpy(s->x + i * hidden, x + s->pair[i] / top_k * hidden, hidden * sizeof(real));
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < e->count * parts; i++) multiply_part(&up, e->up_words, s, i / parts, i % parts, parts);
#pragma omp for
        for (int64_t i = 0; i < found; i++) {
            const float *own = s->up + 2 * i * inner;
            gate_one(e->activation, own, own + inner, inner, &clamps, s->inner + i * inner);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < e->count * parts; i++) multiply_part(&down, e->down_words, s, i / parts, i % parts, parts);
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) {
            float *sum = NULL; /* the first pair's own row */
            for (int64_t k = 0; k < top_k; k++) {
                const int64_t i = t * top_k + k;
                if (s->place[i] < 0) continue;
                float *own = s->down + s->place[i] * hidden;
                for (int64_t c = 0; c < hidden; c++) own[c] = weights[i] * own[c] + (sum ? sum[c] : 0.0f);
                sum = own;
            }
            if (sum) round_row(sum, hidden, y + t * hidden);
            else memset(y + t * hidden, 0, hidden * sizeof(real));
        }
        end_products(before);
    }
}
