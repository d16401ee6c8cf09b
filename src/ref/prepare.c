/*
 * Section 2: norm, RoPE, quantisation and the cache write of one token.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ref.h"

static void load(float *x, const uint16_t *codes, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = csa_bf16_to_float(codes[i]);
}

static void store(uint16_t *codes, const float *x, int n)
{
    for (int i = 0; i < n; i++)
        codes[i] = csa_float_to_bf16(x[i]);
}

static float bf16_at(const csa_tensor *t, int i)
{
    return csa_bf16_to_float(*(const uint16_t *)csa_at(t, i, 0, 0));
}

/* Squares are fp32, as they overflow there; their sum is taken in double and rounded once. */
static float inverse_rms(const float *x, int n, float eps)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)(x[i] * x[i]);
    return 1.0F / sqrtf((float)sum / (float)n + eps);
}

/* bf16((x * inv) * (weight + zero_centered)) */
static void rms_norm(float *x, const csa_tensor *weight, int n, float eps, bool zero_centered)
{
    float inv = inverse_rms(x, n, eps), centre = zero_centered ? 1.0F : 0.0F;
    for (int i = 0; i < n; i++)
        x[i] = csa_round_bf16(x[i] * inv * (bf16_at(weight, i) + centre));
}

/* The index query's norm rounds once more where its weights are not zero-centred. */
static void index_rms_norm(float *x, const csa_tensor *weight, float eps, bool zero_centered)
{
    if (zero_centered) {
        rms_norm(x, weight, CSA_SUMMARY_SIZE, eps, true);
        return;
    }
    float inv = inverse_rms(x, CSA_SUMMARY_SIZE, eps);
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        x[i] = csa_round_bf16(csa_round_bf16(x[i] * inv) * bf16_at(weight, i));
}

static void layer_norm(float *x, const csa_tensor *weight, const csa_tensor *bias, float eps)
{
    double sum = 0;
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        sum += (double)x[i];
    float mean = (float)sum / (float)CSA_SUMMARY_SIZE;
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        x[i] -= mean;
    float inv = inverse_rms(x, CSA_SUMMARY_SIZE, eps);
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        x[i] = csa_round_bf16(fmaf(bf16_at(weight, i), x[i] * inv, bf16_at(bias, i)));
}

static float table_entry(const csa_tensor *table, int64_t position, int64_t column)
{
    const void *entry = csa_at(table, position, column, 0);
    return table->dtype == CSA_F32 ? *(const float *)entry : csa_bf16_to_float(*(const uint16_t *)entry);
}

/* NeoX pairs (i, i + half) of the first `rotary` values. native: products are rounded to bf16. */
static void rotate(float *x, const csa_tensor *table, int64_t position, int64_t rotary, bool native)
{
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        float cosine = table_entry(table, position, i), sine = table_entry(table, position, half + i);
        float low = x[i], high = x[half + i];
        float products[4] = {low * cosine, high * sine, high * cosine, low * sine};
        for (int p = 0; native && p < 4; p++)
            products[p] = csa_round_bf16(products[p]);
        x[i] = csa_round_bf16(products[0] - products[1]);
        x[half + i] = csa_round_bf16(products[2] + products[3]);
    }
}

/* ---- The indexer's part ------------------------------------------------------------------------- */

static void index_query(const csa_prepare_args *a, int64_t token, int64_t position, bool zero)
{
    int64_t heads = a->index_query.shape[2];
    for (int64_t group = 0; group < a->index_query.shape[1]; group++)
        for (int64_t head = 0; head < CSA_INDEX_HEADS; head++) {
            float x[CSA_SUMMARY_SIZE] = {0};
            if (head < heads && !zero) {
                load(x, csa_at(&a->index_query, token, group, head), CSA_SUMMARY_SIZE);
                index_rms_norm(x, &a->index_query_norm, a->eps, a->zero_centered);
                rotate(x, &a->index_rope, position, CSA_INDEX_ROTARY, a->native_rope);
            }
            uint8_t *out = csa_at(&a->index_query_out, token, group, head);
            for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
                out[i] = csa_float_to_e4m3(x[i]);
        }
}

static void index_weights(const csa_prepare_args *a, int64_t token, bool zero)
{
    int64_t heads = a->index_weights.shape[2];
    float scale = (float)(1 / sqrt((double)heads));
    for (int64_t group = 0; group < a->index_weights.shape[1]; group++) {
        const uint16_t *weights = csa_at(&a->index_weights, token, group, 0);
        float *out = csa_at(&a->index_weights_out, token, group, 0);
        for (int64_t head = CSA_INDEX_HEADS - 1; head >= 0; head--)
            out[head] = head < heads && !zero ? csa_bf16_to_float(weights[head]) * scale : 0;
    }
}

static void index_key(const csa_prepare_args *a, int64_t token, int64_t position, bool zero)
{
    float x[CSA_SUMMARY_SIZE] = {0};
    if (!zero) {
        load(x, csa_at(&a->index_key, token, 0, 0), CSA_SUMMARY_SIZE);
        layer_norm(x, &a->index_key_norm, &a->index_key_bias, a->eps);
        rotate(x, &a->index_rope, position, CSA_INDEX_ROTARY, a->native_rope);
    }
    store(csa_at(&a->index_key_out, token, 0, 0), x, CSA_SUMMARY_SIZE);
}

/* ---- The attention's part ----------------------------------------------------------------------- */

static void attention_head(const csa_prepare_args *a, const uint16_t *in, const csa_tensor *norm,
                           int64_t position, bool zero, uint16_t *out)
{
    float x[CSA_HEAD_SIZE] = {0};
    if (!zero) {
        load(x, in, CSA_HEAD_SIZE);
        rms_norm(x, norm, CSA_HEAD_SIZE, a->eps, a->zero_centered);
        if (csa_present(&a->rope))
            rotate(x, &a->rope, position, a->rope.shape[1], false);
    }
    store(out, x, CSA_HEAD_SIZE);
}

/* k or v of one token into the cache; e4m3 divides by the scale, as a reciprocal would change codes. */
static void cache_half(const csa_tensor *kv, void *destination, const uint16_t *x, const float *scale)
{
    if (kv->dtype == CSA_BF16) {
        memcpy(destination, x, CSA_HEAD_SIZE * sizeof *x);
        return;
    }
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        ((uint8_t *)destination)[i] = csa_float_to_e4m3(csa_bf16_to_float(x[i]) / (scale ? *scale : 1.0F));
}

static void attention_group(const csa_prepare_args *a, int64_t token, int64_t group, int64_t position,
                            bool zero)
{
    uint16_t key[CSA_HEAD_SIZE], value[CSA_HEAD_SIZE] = {0};
    for (int64_t head = 0; head < a->query.shape[2]; head++)
        attention_head(a, csa_at(&a->query, token, group, head), &a->query_norm, position, zero,
                       csa_at(&a->query_out, token, group, head));
    attention_head(a, csa_at(&a->key, token, group, 0), &a->key_norm, position, zero, key);
    if (!zero)
        memcpy(value, csa_at(&a->value, token, group, 0), sizeof value);
    if (csa_present(&a->key_out))
        memcpy(csa_at(&a->key_out, token, group, 0), key, sizeof key);
    if (csa_present(&a->value_out))
        memcpy(csa_at(&a->value_out, token, group, 0), value, sizeof value);
    char *row = csa_cache_row(a->tokens, a->cache, token, group);
    if (row) {
        cache_half(&a->cache->kv, row, key, a->cache->k_scale);
        cache_half(&a->cache->kv, row + CSA_HEAD_SIZE * csa_itemsize(a->cache->kv.dtype), value,
                   a->cache->v_scale);
    }
}

/* -------------------------------------------------------------------------------------------------- */

static void prepare_token(void *data, int64_t token)
{
    const csa_prepare_args *a = data;
    int64_t position = csa_token_position(a->tokens, token);
    bool outside = !csa_in_table(&a->index_rope, position) || !csa_in_table(&a->rope, position);
    index_query(a, token, position, outside);
    index_weights(a, token, outside);
    index_key(a, token, position, outside);
    for (int64_t group = 0; csa_present(&a->query) && group < a->query.shape[1]; group++)
        attention_group(a, token, group, position, outside);
}

csa_status csa_ref_prepare(const csa_context *context, const csa_prepare_args *args)
{
    return csa_parallel(context, args->index_query.shape[0], prepare_token, (void *)args);
}
