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
    int64_t heads, kv_heads, size, block_size, window, activation;
    float scale, softcap;
} Layer;

typedef struct {
    const int32_t *pieces;
    int64_t num_pieces;
    const float *weights;
} Pass;

typedef struct {
    int64_t tokens, num_passes, rotated, num_attention_pieces, most_tokens;
    const Pass *passes;
    const int64_t *places;
    const float *cos, *sin;
    const int32_t *tables, *attention_pieces;
} Step;

static void product(const Weight *w, const real *x, int64_t tokens, float *y) {
    packed_linear(x, w->in, tokens, w->in, w->panels, w->kind, w->bias, y, w->out);
}

static void adapt(const Step *s, const Adapters *a, int64_t count, const real *x, int64_t in, float *y, int64_t stride) {
    for (int64_t p = 0; p < s->num_passes; p++) {
        const Pass *pass = s->passes + p;
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->num_pieces * count; i++) {
            const int64_t later = i + omp_get_num_threads(); /* the next that this thread takes, if all go on alike */
            const Adapters *own = a + i % count;
            const void *after = later < pass->num_pieces * count
                                    ? (const void *)a[later % count].a[pass->pieces[3 * (later / count) + 2]]
                                    : NULL;
            add_piece(x, in, y + own->column, stride, in, own->out, pass->pieces + 3 * (i / count),
                      pass->weights ? pass->weights[i / count] : 1.0f, own->a, own->b, own->gain, own->shift, own->rank,
                      own->scale, own->is_bfloat16, after);
        }
    }
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
    return widest(l) * sizeof(float) + (l->joined_attention.in + inner) * sizeof(real);
}

/* h [tokens, hidden], changed in place; room [tokens, room_bytes]; the pools are this layer's. */
void decoder_layer(const Layer *l, const Step *s, real *h, void *room, real *key_pool, real *value_pool) {
    const int64_t tokens = s->tokens, hidden = l->joined_attention.in, stride = l->joined_attention.out;
    const int64_t queries = l->heads * l->size, keys = l->kv_heads * l->size;
    float *y = room; /* of products */
    real *x = (real *)(y + tokens * widest(l)), *inner = x + tokens * hidden;

    normalise(&l->before_attention, h, tokens, hidden, x);
    product(&l->joined_attention, x, tokens, y);
    adapt(s, l->adapters, 3, x, hidden, y, stride);
    for (int64_t t = 0; l->query.weight && t < tokens; t++) {
        normalise_heads(&l->query, y + t * stride, l->heads, l->size);
        normalise_heads(&l->key, y + t * stride + queries, l->kv_heads, l->size);
    }
    rotate_store(y, stride, y + queries, stride, y + queries + keys, stride, tokens, l->heads, l->kv_heads, l->size,
                 s->cos, s->sin, s->rotated, s->places, key_pool, value_pool);
    paged_attention(y, stride, key_pool, value_pool, inner, l->heads, l->kv_heads, l->size, l->block_size,
                    s->tables, s->attention_pieces, s->num_attention_pieces, s->most_tokens, l->scale, l->window, l->softcap);
    product(&l->output, inner, tokens, y);
    adapt(s, l->adapters + 3, 1, inner, queries, y, hidden);
    add_to(h, y, tokens * hidden);

    normalise(&l->before_mlp, h, tokens, hidden, x);
    product(&l->joined_mlp, x, tokens, y);
    adapt(s, l->adapters + 4, 2, x, hidden, y, l->joined_mlp.out);
    gated(y, y + l->down.in, l->joined_mlp.out, tokens, l->down.in, l->activation, inner);
    product(&l->down, inner, tokens, y);
    adapt(s, l->adapters + 6, 1, inner, l->down.in, y, hidden);
    add_to(h, y, tokens * hidden);
}
