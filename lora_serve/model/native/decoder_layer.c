/* A whole decoder layer in one call, of the kernels beside it:
 *
 *     h += output(attend(rotate(qkv(norm(h)))))        h += down(act(gate(m)) * up(m)),  m = norm(h)
 *
 * where every linear layer is y = x W^T + bias and then, for each token, what its adapters add (lora.c). What is the
 * model's is in Layer, filled once; what is the step's in Step. `room` holds what lies between the kernels.
 */
#include "layers.c"
#include "lora.c"
#include "packed_linear.c"
#include "paged_attention.c"

typedef struct {
    const void *panels;
    int64_t kind, in, out;
    const float *bias;
    int64_t group, depth; /* of codes: see Product */
    const int32_t *order;
} Weight;

typedef struct { /* one linear layer's rows of the slot tables; columns: where its outputs begin in a joined product */
    const int64_t *a, *b, *gain, *shift;
    const int32_t *rank;
    const float *scale;
    const int32_t *is_bfloat16;
    int64_t column, out;
} Adapters;

typedef struct {
    const float *weight;
    float offset, epsilon;
} Norm;

typedef struct {
    Weight joined_attention, output, joined_mlp, down;
    Adapters adapters[7]; /* q, k, v, output, gate, up, down */
    Norm before_attention, before_mlp, query, key; /* weight NULL: none */
    int64_t heads, kv_heads, size, block_size, window, chunk, activation;
    float scale, softcap;
} Layer;

typedef struct {
    const int32_t *pieces;
    int64_t num_pieces;
    const float *weights;
} Pass;

typedef struct {
    int64_t tokens, num_passes, rotated, num_attention_pieces, most_tokens, stored;
    const Pass *passes;
    const int64_t *places;
    const float *cos, *sin;
    const int32_t *tables, *attention_pieces;
} Step;

#define LONG 32 /* tokens with one adapter, for which it joins the product */
#define MOST_RUNS 16

typedef struct { /* the adapters that join a product, and the pieces of the first pass that are done with them */
    int64_t count, first_piece[MOST_RUNS], end_piece[MOST_RUNS];
    Run runs[MOST_RUNS];
} Joining;

#ifdef REAL_IS_BFLOAT16

static int may_join(const Adapters *a, int32_t slot) {
    if (a->gain[slot] || a->shift[slot]) return 0; /* these come before what is added */
    return !a->a[slot] || (a->is_bfloat16[slot] && a->rank[slot] <= MOST_RANK);
}

/* The number of pieces from `first` on that are one segment. */
static int64_t pieces_of_segment(const Pass *pass, int64_t first, int64_t *tokens) {
    const int32_t *own = pass->pieces + 3 * first;
    int64_t i = first;
    for (*tokens = 0; i < pass->num_pieces; i++) {
        const int32_t *piece = pass->pieces + 3 * i;
        if (piece[0] != own[0] + *tokens || piece[2] != own[2]) break;
        if (pass->weights && pass->weights[i] != pass->weights[first]) break;
        *tokens += piece[1];
    }
    return i - first;
}

/* The part of each linear layer in a run of tokens with one adapter; the end of `room` that its s take. */
static real *lay_out_run(const Adapters *a, int64_t count, int32_t slot, Run *run, real *room) {
    for (int64_t m = 0; m < count; m++) {
        const int64_t rank = a[m].a[slot] ? a[m].rank[slot] : 0, depth = up_to(rank, DEPTH_UNIT);
        run->parts[m] = (Part){room, rank ? (const real *)a[m].b[slot] : NULL, rank, depth, a[m].column, a[m].out};
        room += run->rows * depth;
    }
    return room;
}

/* x A^T of this thread's share of a run's tokens. */
static void shrink_run(const Adapters *a, int64_t count, int32_t slot, float weight, const Run *run, const real *x,
                       int64_t in) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t units = (run->rows + 15) / 16, first = 16 * (units * thread / threads);
    const int64_t end = least(run->rows, 16 * (units * (thread + 1) / threads));
    Shrink own[MOST_JOINED];
    int64_t n = 0;
    for (int64_t m = 0; m < count && first < end; m++) {
        const Part *part = run->parts + m;
        if (!part->b) continue;
        real *s = (real *)part->s + first * part->depth;
        if (part->rank < part->depth) memset(s, 0, (end - first) * part->depth * sizeof(real));
        own[n++] = (Shrink){(const real *)a[m].a[slot], part->rank, weight * a[m].scale[slot], s, part->depth};
    }
    if (n) shrink_together(own, n, end - first, x + (run->first + first) * in, in, in);
}

static void join(const Step *s, const Adapters *a, int64_t count, const real *x, int64_t in, real *room, Joining *found) {
    const Pass *pass = s->passes;
    found->count = 0;
    for (int64_t i = 0, pieces; s->num_passes && i < pass->num_pieces && found->count < MOST_RUNS; i += pieces) {
        const int32_t *piece = pass->pieces + 3 * i;
        int64_t tokens, may = 1;
        pieces = pieces_of_segment(pass, i, &tokens);
        for (int64_t m = 0; m < count; m++) may = may && may_join(a + m, piece[2]);
        if (tokens < LONG || !may) continue;
        const int64_t n = found->count++;
        found->first_piece[n] = i, found->end_piece[n] = i + pieces;
        found->runs[n] = (Run){.first = piece[0], .rows = tokens};
        room = lay_out_run(a, count, piece[2], found->runs + n, room);
    }
    if (found->count == 0) return;
#pragma omp parallel
    {
        const uint64_t before = begin_products();
        for (int64_t n = 0; n < found->count; n++) {
            const int64_t i = found->first_piece[n];
            shrink_run(a, count, pass->pieces[3 * i + 2], pass->weights ? pass->weights[i] : 1.0f, found->runs + n, x, in);
        }
        end_products(before);
    }
}

#else

static void join(const Step *s, const Adapters *a, int64_t count, const real *x, int64_t in, real *room, Joining *found) {
    (void)s, (void)a, (void)count, (void)x, (void)in, (void)room;
    found->count = 0;
}

#endif

static int has_joined(const Joining *joining, int64_t pass, int64_t piece) {
    for (int64_t n = 0; pass == 0 && n < joining->count; n++)
        if (joining->first_piece[n] <= piece && piece < joining->end_piece[n]) return 1;
    return 0;
}

static void adapt(const Step *s, const Adapters *a, int64_t count, const real *x, int64_t in, float *y, int64_t stride,
                  const Joining *joining) {
    for (int64_t p = 0; p < s->num_passes; p++) {
        const Pass *pass = s->passes + p;
#pragma omp parallel
        {
            const uint64_t before = begin_products();
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < pass->num_pieces * count; i++) {
                if (has_joined(joining, p, i / count)) continue;
                const int64_t later = i + omp_get_num_threads(); /* the next that this thread takes, if all go on alike */
                const Adapters *own = a + i % count;
                const void *after = later < pass->num_pieces * count
                                        ? (const void *)a[later % count].a[pass->pieces[3 * (later / count) + 2]]
                                        : NULL;
                add_piece(x, in, y + own->column, stride, in, own->out, pass->pieces + 3 * (i / count),
                          pass->weights ? pass->weights[i / count] : 1.0f, own->a, own->b, own->gain, own->shift,
                          own->rank, own->scale, own->is_bfloat16, after);
            }
            end_products(before);
        }
    }
}

/* y [tokens][w->out] = x W^T + bias, and what `count` linear layers' adapters add. */
static void product(const Weight *w, const Step *s, const Adapters *a, int64_t count, const real *x, real *room,
                    float *y) {
    Joining joining;
    join(s, a, count, x, w->in, room, &joining);
    multiply_all(&(Product){x, w->in, s->tokens, w->in, w->panels, w->kind, w->bias, y, w->out, joining.runs,
                            joining.count, w->group, w->depth, w->order});
    adapt(s, a, count, x, w->in, y, w->out, &joining);
}

static void normalise(const Norm *n, const real *h, int64_t tokens, int64_t size, real *x) {
    rms_norm(h, size, tokens, size, n->weight, n->offset, n->epsilon, REALS, x);
}

/* Heads of q or k, each by itself, in place. */
static void normalise_heads(const Norm *n, float *y, int64_t heads, int64_t size) {
    rms_norm(y, size, heads, size, n->weight, n->offset, n->epsilon, SUMS, y);
}

static int64_t widest(const Layer *l) {
    const int64_t most = l->joined_attention.out > l->joined_mlp.out ? l->joined_attention.out : l->joined_mlp.out;
    return most > l->output.out ? most : l->output.out;
}

/* Of each token. */
int64_t room_bytes(const Layer *l) {
    const int64_t inner = l->output.in > l->down.in ? l->output.in : l->down.in;
    return widest(l) * sizeof(float) + (l->joined_attention.in + inner + MOST_JOINED * MOST_RANK) * sizeof(real);
}

/* h [tokens, hidden], changed in place; room [tokens, room_bytes]; the pools are this layer's. */
void decoder_layer(const Layer *l, const Step *s, real *h, void *room, real *key_pool, real *value_pool) {
    const int64_t tokens = s->tokens, hidden = l->joined_attention.in, stride = l->joined_attention.out;
    const int64_t queries = l->heads * l->size, keys = l->kv_heads * l->size;
    float *y = room; /* of products */
    real *x = (real *)(y + tokens * widest(l)), *shrunk = x + tokens * hidden;
    real *inner = shrunk + tokens * MOST_JOINED * MOST_RANK;

    normalise(&l->before_attention, h, tokens, hidden, x);
    product(&l->joined_attention, s, l->adapters, 3, x, shrunk, y);
    for (int64_t t = 0; l->query.weight && t < tokens; t++) {
        normalise_heads(&l->query, y + t * stride, l->heads, l->size);
        normalise_heads(&l->key, y + t * stride + queries, l->kv_heads, l->size);
    }
    rotate_store(y, stride, y + queries, stride, y + queries + keys, stride, tokens, l->heads, l->kv_heads, l->size,
                 s->cos, s->sin, s->rotated, s->places, s->stored, key_pool, value_pool);
    paged_attention(y, stride, key_pool, value_pool, inner, l->heads, l->kv_heads, l->size, l->block_size,
                    s->tables, s->attention_pieces, s->num_attention_pieces, s->most_tokens, l->scale, l->window, l->chunk,
                    l->softcap, NULL, s->stored);
    product(&l->output, s, l->adapters + 3, 1, inner, shrunk, y);
    add_to(h, y, tokens * hidden);

    normalise(&l->before_mlp, h, tokens, hidden, x);
    product(&l->joined_mlp, s, l->adapters + 4, 2, x, shrunk, y);
    gated(y, y + l->down.in, l->joined_mlp.out, tokens, l->down.in, l->activation, (Clamps){0}, inner);
    product(&l->down, s, l->adapters + 6, 1, inner, shrunk, y);
    add_to(h, y, tokens * hidden);
}
