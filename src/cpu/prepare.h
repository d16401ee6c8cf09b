/*
 * Section 2: norm, RoPE, quantisation and the cache write; one (token, KV group) is one piece of work, and a
 * token's index key goes with its group 0.
 *
 * A batch of up to LANES heads is widened to fp32 in L1, the lane sums of their squares share one transpose,
 * then each head is normed, rotated and stored. A batch is read whole before any of it is written, so outputs
 * may be their inputs. Sums run over lanes first, in an order that depends on nothing but the tier.
 *
 * Bound by rounding to bf16 (eight operations a vector) while in L2, by memory beyond it.
 * SPDX-License-Identifier: Apache-2.0
 */

/* Norm weights in fp32, with 1 added where they are stored less 1: once a call. */
typedef struct prepare_call {
    const csa_prepare_args *args;
    float index_query[CSA_SUMMARY_SIZE], index_key[CSA_SUMMARY_SIZE], index_bias[CSA_SUMMARY_SIZE];
    float query[CSA_HEAD_SIZE], key[CSA_HEAD_SIZE];
} prepare_call;

/* A token's row of a RoPE table; zeros fill up the last vector. */
typedef struct prepare_angles {
    float cosine[CSA_HEAD_SIZE / 2], sine[CSA_HEAD_SIZE / 2];
    int half;
} prepare_angles;

typedef struct prepare_piece {
    const prepare_call *call;
    const csa_prepare_args *args;
    int64_t token, group;
    bool zero; /* the position has no row in a table: all outputs are zeros */
    prepare_angles index, attention;
} prepare_piece;

typedef float prepare_head[CSA_SUMMARY_SIZE]; /* index heads use all of it, attention heads 192 */

/* How the heads of one kind are normed and rotated. */
typedef struct prepare_kind {
    int size;
    const float *weight;
    bool twice;  /* round before the weight, too */
    bool native; /* round the rotation's products */
    const prepare_angles *angles;
} prepare_kind;

/* ---- Weights and angles ------------------------------------------------------------------------- */

/* Adding -0 changes nothing. */
static void prepare_weight(float *to, const csa_tensor *weight, int size, float centre)
{
    const uint16_t *codes = weight->data;
    for (int i = 0; weight->stride[0] == 1 && i < size; i += LANES)
        vf_store(to + i, vf_load_bf16(codes + i) + vf_set1(centre));
    for (int i = 0; weight->stride[0] != 1 && i < size; i++)
        to[i] = csa_bf16_to_float(*(const uint16_t *)csa_at(weight, i, 0, 0)) + centre;
}

static void prepare_entries(float *to, const csa_tensor *table, int64_t position, int first, int count)
{
    const void *entries = csa_at(table, position, first, 0);
    if (table->dtype == CSA_F32) {
        memcpy(to, entries, (size_t)count * sizeof *to);
        return;
    }
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        vf_store(to + i, vf_load_bf16((const uint16_t *)entries + i));
    for (; i < count; i++)
        to[i] = csa_bf16_to_float(((const uint16_t *)entries)[i]);
}

static void prepare_find_angles(prepare_angles *angles, const csa_tensor *table, int64_t position)
{
    angles->half = csa_present(table) ? (int)(table->shape[1] / 2) : 0;
    if (angles->half == 0)
        return;
    int last = (angles->half - 1) / LANES * LANES;
    vf_store(angles->cosine + last, vf_set1(0));
    vf_store(angles->sine + last, vf_set1(0));
    prepare_entries(angles->cosine, table, position, 0, angles->half);
    prepare_entries(angles->sine, table, position, angles->half, angles->half);
}

/* ---- Heads -------------------------------------------------------------------------------------- */

static inline void prepare_widen(float *x, const uint16_t *codes, int size)
{
    for (int i = 0; i < size; i += LANES)
        vf_store(x + i, vf_load_bf16(codes + i));
}

/* To bf16, of what has been rounded to bf16 already. */
static inline void prepare_narrow(uint16_t *codes, const float *x, int size)
{
    for (int i = 0; i < size; i += LANES) {
        vh narrow = __builtin_convertvector(vi_load(x + i) >> 16, vh);
        memcpy(codes + i, &narrow, sizeof narrow);
    }
}

/* Squares are not fused with their additions: they overflow in fp32. */
static inline vf prepare_squares(const float *x, int size)
{
    vf sum[4] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
    for (int i = 0; i < size; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            vf v = vf_load(x + i + (ptrdiff_t)k * LANES);
            sum[k] = sum[k] + v * v;
        }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* 1 / rms of each head. */
static inline void prepare_inverses(prepare_head *x, int count, int size, float eps, float *inverse)
{
    vf squares[LANES];
    for (int h = 0; h < LANES; h++)
        squares[h] = h < count ? prepare_squares(x[h], size) : vf_set1(0);
    vf_store(inverse, vf_sums(squares));
    for (int h = 0; h < count; h++)
        inverse[h] = 1.0F / sqrtf(inverse[h] / (float)size + eps);
}

static inline void prepare_norm(float *x, const prepare_kind *kind, float inverse)
{
    for (int i = 0; i < kind->size; i += LANES) {
        vf v = vf_load(x + i) * vf_set1(inverse);
        v = kind->twice ? vf_round_bf16(v) : v;
        vf_store(x + i, vf_round_bf16(v * vf_load(kind->weight + i)));
    }
}

/* LANES pairs. */
static inline void prepare_rotate_pairs(float *low, float *high, const float *cosine, const float *sine,
                                        bool native)
{
    vf x = vf_load(low), y = vf_load(high), c = vf_load(cosine), s = vf_load(sine);
    vf products[4] = {x * c, y * s, y * c, x * s};
    for (int p = 0; native && p < 4; p++)
        products[p] = vf_round_bf16(products[p]);
    vf_store(low, vf_round_bf16(products[0] - products[1]));
    vf_store(high, vf_round_bf16(products[2] + products[3]));
}

static inline void prepare_rotate(float *x, const prepare_angles *angles, bool native)
{
    int half = angles->half, i = 0;
    for (; i + LANES <= half; i += LANES)
        prepare_rotate_pairs(x + i, x + half + i, angles->cosine + i, angles->sine + i, native);
    if (i == half)
        return;
    float low[LANES] = {0}, high[LANES] = {0}; /* in place, the two would overlap */
    size_t rest = (size_t)(half - i) * sizeof *x;
    memcpy(low, x + i, rest);
    memcpy(high, x + half + i, rest);
    prepare_rotate_pairs(low, high, angles->cosine + i, angles->sine + i, native);
    memcpy(x + i, low, rest);
    memcpy(x + half + i, high, rest);
}

static inline void prepare_heads(prepare_head *x, int count, const prepare_kind *kind, float eps)
{
    float inverse[LANES];
    prepare_inverses(x, count, kind->size, eps, inverse);
    for (int h = 0; h < count; h++) {
        prepare_norm(x[h], kind, inverse[h]);
        prepare_rotate(x[h], kind->angles, kind->native);
    }
}

/* ---- The indexer's part ------------------------------------------------------------------------- */

static void prepare_index_query(const prepare_piece *p)
{
    const csa_prepare_args *a = p->args;
    int heads = p->zero ? 0 : (int)a->index_query.shape[2];
    prepare_head x[4];
    prepare_kind kind = {CSA_SUMMARY_SIZE, p->call->index_query, !a->zero_centered, a->native_rope, &p->index};
    for (int h = 0; h < heads; h++)
        prepare_widen(x[h], csa_at(&a->index_query, p->token, p->group, h), CSA_SUMMARY_SIZE);
    prepare_heads(x, heads, &kind, a->eps);
    for (int h = 0; h < CSA_INDEX_HEADS; h++) {
        uint8_t *out = csa_at(&a->index_query_out, p->token, p->group, h);
        if (h >= heads)
            memset(out, 0, CSA_SUMMARY_SIZE);
        for (int i = 0; h < heads && i < CSA_SUMMARY_SIZE; i += LANES)
            vf_store_e4m3(out + i, vf_load(x[h] + i));
    }
}

static void prepare_index_weights(const prepare_piece *p)
{
    int64_t heads = p->args->index_weights.shape[2];
    float scale = (float)(1 / sqrt((double)heads));
    const uint16_t *weights = csa_at(&p->args->index_weights, p->token, p->group, 0);
    float *out = csa_at(&p->args->index_weights_out, p->token, p->group, 0);
    for (int64_t h = 0; h < CSA_INDEX_HEADS; h++)
        out[h] = h < heads && !p->zero ? csa_bf16_to_float(weights[h]) * scale : 0;
}

/* Terms are made small first, so that no lane overflows where the sum would not. */
static inline float prepare_mean(const float *x)
{
    vf sums[LANES];
    for (int i = 0; i < LANES; i++)
        sums[i] = vf_set1(0);
    for (int i = 0; i < CSA_SUMMARY_SIZE; i += LANES)
        sums[0] = sums[0] + vf_load(x + i) * vf_set1(1.0F / CSA_SUMMARY_SIZE);
    return vf_sums(sums)[0] * CSA_SUMMARY_SIZE / CSA_SUMMARY_SIZE;
}

static void prepare_layer_norm(const prepare_call *call, prepare_head *x)
{
    float inverse[LANES];
    vf mean = vf_set1(prepare_mean(*x));
    for (int i = 0; i < CSA_SUMMARY_SIZE; i += LANES)
        vf_store(*x + i, vf_load(*x + i) - mean);
    prepare_inverses(x, 1, CSA_SUMMARY_SIZE, call->args->eps, inverse);
    for (int i = 0; i < CSA_SUMMARY_SIZE; i += LANES) {
        vf v = vf_load(*x + i) * vf_set1(inverse[0]);
        v = vf_fma(vf_load(call->index_key + i), v, vf_load(call->index_bias + i));
        vf_store(*x + i, vf_round_bf16(v));
    }
}

static void prepare_index_key(const prepare_piece *p)
{
    prepare_head x[1];
    uint16_t *out = csa_at(&p->args->index_key_out, p->token, 0, 0);
    if (p->zero) {
        memset(out, 0, CSA_SUMMARY_SIZE * sizeof *out);
        return;
    }
    prepare_widen(*x, csa_at(&p->args->index_key, p->token, 0, 0), CSA_SUMMARY_SIZE);
    prepare_layer_norm(p->call, x);
    prepare_rotate(*x, &p->index, p->args->native_rope);
    prepare_narrow(out, *x, CSA_SUMMARY_SIZE);
}

/* ---- The attention's part ----------------------------------------------------------------------- */

static void prepare_query(const prepare_piece *p)
{
    const csa_tensor *in = &p->args->query, *out = &p->args->query_out;
    prepare_head x[LANES];
    prepare_kind kind = {CSA_HEAD_SIZE, p->call->query, false, false, &p->attention};
    for (int64_t h = 0; p->zero && h < in->shape[2]; h++)
        memset(csa_at(out, p->token, p->group, h), 0, CSA_HEAD_SIZE * sizeof(uint16_t));
    for (int64_t first = 0; !p->zero && first < in->shape[2]; first += LANES) {
        int count = (int)(in->shape[2] - first < LANES ? in->shape[2] - first : LANES);
        for (int h = 0; h < count; h++)
            prepare_widen(x[h], csa_at(in, p->token, p->group, first + h), CSA_HEAD_SIZE);
        prepare_heads(x, count, &kind, p->args->eps);
        for (int h = 0; h < count; h++)
            prepare_narrow(csa_at(out, p->token, p->group, first + h), x[h], CSA_HEAD_SIZE);
    }
}

/* k or v of one token into the cache; e4m3 divides by the scale, as a reciprocal would change codes. */
static void prepare_cache_half(const csa_tensor *kv, void *row, const uint16_t *x, const float *scale)
{
    if (kv->dtype == CSA_BF16) {
        memcpy(row, x, CSA_HEAD_SIZE * sizeof *x);
        return;
    }
    vf divisor = vf_set1(scale ? *scale : 1.0F);
    for (int i = 0; i < CSA_HEAD_SIZE; i += LANES)
        vf_store_e4m3((uint8_t *)row + i, vf_load_bf16(x + i) / divisor);
}

static void prepare_key(const prepare_piece *p, uint16_t *key)
{
    prepare_head x[1];
    prepare_kind kind = {CSA_HEAD_SIZE, p->call->key, false, false, &p->attention};
    prepare_widen(*x, csa_at(&p->args->key, p->token, p->group, 0), CSA_HEAD_SIZE);
    prepare_heads(x, 1, &kind, p->args->eps);
    prepare_narrow(key, *x, CSA_HEAD_SIZE);
}

static void prepare_key_value(const prepare_piece *p)
{
    const csa_prepare_args *a = p->args;
    uint16_t key[CSA_HEAD_SIZE] = {0}, value[CSA_HEAD_SIZE] = {0};
    if (!p->zero) {
        prepare_key(p, key);
        memcpy(value, csa_at(&a->value, p->token, p->group, 0), sizeof value);
    }
    if (csa_present(&a->key_out))
        memcpy(csa_at(&a->key_out, p->token, p->group, 0), key, sizeof key);
    if (csa_present(&a->value_out))
        memcpy(csa_at(&a->value_out, p->token, p->group, 0), value, sizeof value);
    char *row = csa_cache_row(a->tokens, a->cache, p->token, p->group);
    if (row) {
        prepare_cache_half(&a->cache->kv, row, key, a->cache->k_scale);
        prepare_cache_half(&a->cache->kv, row + CSA_HEAD_SIZE * csa_itemsize(a->cache->kv.dtype), value,
                           a->cache->v_scale);
    }
}

/* -------------------------------------------------------------------------------------------------- */

static void prepare_run(void *data, int64_t index)
{
    const prepare_call *call = data;
    const csa_prepare_args *a = call->args;
    int64_t groups = a->index_query.shape[1], position = csa_token_position(a->tokens, index / groups);
    prepare_piece p; /* angles are not cleared */
    p.call = call;
    p.args = a;
    p.token = index / groups;
    p.group = index % groups;
    p.zero = !csa_in_table(&a->index_rope, position) || !csa_in_table(&a->rope, position);
    if (!p.zero) {
        prepare_find_angles(&p.index, &a->index_rope, position);
        prepare_find_angles(&p.attention, &a->rope, position);
    }
    prepare_index_query(&p);
    prepare_index_weights(&p);
    if (p.group == 0)
        prepare_index_key(&p);
    if (csa_present(&a->query)) {
        prepare_query(&p);
        prepare_key_value(&p);
    }
}

static void prepare_begin(prepare_call *call, const csa_prepare_args *args)
{
    call->args = args;
    float centre = args->zero_centered ? 1.0F : 0.0F;
    prepare_weight(call->index_query, &args->index_query_norm, CSA_SUMMARY_SIZE,
                   args->zero_centered ? 1.0F : -0.0F);
    prepare_weight(call->index_key, &args->index_key_norm, CSA_SUMMARY_SIZE, -0.0F);
    prepare_weight(call->index_bias, &args->index_key_bias, CSA_SUMMARY_SIZE, -0.0F);
    if (csa_present(&args->query)) {
        prepare_weight(call->query, &args->query_norm, CSA_HEAD_SIZE, centre);
        prepare_weight(call->key, &args->key_norm, CSA_HEAD_SIZE, centre);
    }
}

/* Nanoseconds of one (token, group). */
static int64_t prepare_cost(const csa_prepare_args *args)
{
    return 70 * (args->index_query.shape[2] + (csa_present(&args->query) ? args->query.shape[2] : 0));
}

static csa_status prepare(const csa_context *context, const csa_prepare_args *args)
{
    prepare_call call;
    prepare_begin(&call, args);
    int64_t pieces = args->index_query.shape[0] * args->index_query.shape[1];
    return csa_parallel_small(context, pieces, prepare_cost(args), prepare_run, &call);
}
