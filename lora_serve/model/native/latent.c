/* Latent attention (arXiv 2405.04434) in one call, of the kernels beside it:
 *
 *     q = query(norm(c)), [k, v] = keys(norm(l)),  [c, l, r] = joined(x);    y = output(attend(q, [k, r], v))
 *
 * with the ends of q and the shared r rotated, or q = c where queries have no latent vector. Linear layers are as in
 * decoder_layer.c.
 */

typedef struct {
    Weight joined, query, keys, output; /* query.panels NULL: there is none */
    Adapters adapters[5];               /* of what queries come of, of what keys come of, query, keys, output */
    Norm query_norm, latent_norm;
    int64_t heads, own, rotated, value, block_size, window, chunk, by_pairs;
    float scale, softcap;
} Latent;

typedef struct {
    float *joined, *q, *kv, *y;
    real *x, *shrunk, *out;
} LatentRoom;

static int64_t lay_out_latent(const Latent *l, int64_t tokens, char *from, LatentRoom *s) {
    const int64_t queries = l->heads * (l->own + l->rotated), widest = l->query.in > l->keys.in ? l->query.in : l->keys.in;
    int64_t used = 0;
    s->joined = take(from, &used, tokens * l->joined.out * sizeof(float));
    s->q = take(from, &used, tokens * queries * sizeof(float));
    s->kv = take(from, &used, tokens * l->keys.out * sizeof(float));
    s->y = take(from, &used, tokens * l->output.out * sizeof(float));
    s->x = take(from, &used, tokens * widest * sizeof(real));
    s->shrunk = take(from, &used, tokens * MOST_JOINED * MOST_RANK * sizeof(real));
    s->out = take(from, &used, tokens * queries * sizeof(real));
    return used;
}

/* Of each token; one alone has all the gaps between the parts. */
int64_t latent_room(const Latent *l) {
    LatentRoom room;
    return lay_out_latent(l, 1, NULL, &room) + 64;
}

/* Rows of sums, `stride` apart, as an input of a product. */
static void normalise_sums(const Norm *n, float *x, int64_t stride, int64_t tokens, int64_t size, real *y) {
    for (int64_t t = 0; t < tokens; t++, x += stride, y += size) {
        rms_norm(x, size, 1, size, n->weight, n->offset, n->epsilon, SUMS, x);
        round_row(x, size, y);
    }
}

/* x [tokens, hidden] -> y of its shape; the pools are this layer's. */
void latent_attention(const Latent *l, const Step *s, const real *x, void *room, real *key_pool, real *value_pool, real *y) {
    const int64_t tokens = s->tokens, size = l->own + l->rotated, stride = l->joined.out, rank = l->keys.in;
    const int64_t first = stride - rank - l->rotated; /* of what keys and values come of */
    LatentRoom r;
    lay_out_latent(l, tokens, (char *)room + (64 - (uintptr_t)room % 64) % 64, &r);
    product(&l->joined, s, l->adapters, 2, x, r.shrunk, r.joined);
    float *q = r.joined;
    int64_t q_stride = stride;
    if (l->query.panels) {
        normalise_sums(&l->query_norm, r.joined, stride, tokens, l->query.in, r.x);
        product(&l->query, s, l->adapters + 2, 1, r.x, r.shrunk, r.q);
        q = r.q, q_stride = l->heads * size;
    }
    normalise_sums(&l->latent_norm, r.joined + first, stride, tokens, rank, r.x);
    product(&l->keys, s, l->adapters + 3, 1, r.x, r.shrunk, r.kv);
    latent_store(q, q_stride, r.kv, l->keys.out, r.joined + first + rank, stride, tokens, l->heads, l->own, l->rotated,
                 l->value, s->cos, s->sin, l->by_pairs, s->places, s->stored, key_pool, value_pool);
    paged_attention(q, q_stride, key_pool, value_pool, r.out, l->heads, l->heads, size, l->block_size, s->tables,
                    s->attention_pieces, s->num_attention_pieces, s->most_tokens, l->scale, l->window, l->chunk,
                    l->softcap, NULL, s->stored);
    for (int64_t i = 1; l->value < size && i < tokens * l->heads; i++) /* values without the zeros behind them */
        memmove(r.out + i * l->value, r.out + i * size, l->value * sizeof(real));
    product(&l->output, s, l->adapters + 4, 1, r.out, r.shrunk, r.y);
    for (int64_t t = 0; t < tokens; t++) round_row(r.y + t * l->output.out, l->output.out, y + t * l->output.out);
}
