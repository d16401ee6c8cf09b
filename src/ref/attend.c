/*
 * Section 6: attention to the tokens of the selected regions. Logits, weights and sums are taken in double and
 * rounded once, so that the definition has no order.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ref.h"

enum { MAX_TOKENS = (CSA_MAX_TOPK + 1) * CSA_REGION };

/* The cache rows a row attends to. */
typedef struct token_list {
    int64_t count;
    const void *kv[MAX_TOKENS]; /* keys; the value follows its key */
} token_list;

static double kv_element(const csa_tensor *kv, const void *token, int i)
{
    if (kv->dtype == CSA_E4M3)
        return (double)csa_e4m3_to_float(((const uint8_t *)token)[i]);
    return (double)csa_bf16_to_float(((const uint16_t *)token)[i]);
}

static void list_region(const csa_attend_args *a, int64_t request, int64_t group, int64_t region,
                        int64_t position, token_list *list)
{
    const csa_tensor *kv = &a->cache->kv;
    int64_t block, count = csa_region_tokens(a->tokens, kv, request, region, position, &block);
    for (int64_t i = 0; i < count; i++)
        list->kv[list->count++] = csa_at(kv, block, group, region * CSA_REGION % kv->shape[2] + i);
}

static void list_tokens(const csa_attend_args *a, int64_t row, int64_t position, token_list *list)
{
    int64_t groups = a->query.shape[1], columns = a->selected.shape[1];
    int64_t request = csa_token_owner(a->tokens, row / groups), *entries = csa_at(&a->selected, row, 0, 0);
    int64_t live = position / CSA_REGION < columns ? position / CSA_REGION + 1 : columns;
    list->count = 0;
    for (int64_t i = columns - live; i < columns; i++)
        list_region(a, request, row % groups, entries[i], position, list);
}

/* Turns the list's logits into weights exp(logit - largest) and returns their sum. Infinities and NaN take the
 * course the formula gives them. */
static double softmax(double *weights, int64_t count, double *largest)
{
    double sum = 0;
    *largest = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (!(weights[i] <= *largest))
            *largest = weights[i];
    for (int64_t i = 0; i < count; i++) {
        weights[i] = exp(weights[i] - *largest);
        sum += weights[i];
    }
    return sum;
}

static double dot(const csa_tensor *kv, const uint16_t *query, const void *key)
{
    double sum = 0;
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        sum += (double)csa_bf16_to_float(query[i]) * kv_element(kv, key, i);
    return sum;
}

static void attend_head(const csa_attend_args *a, const token_list *list, const uint16_t *query, uint16_t *out,
                        float *lse)
{
    const csa_tensor *kv = &a->cache->kv;
    bool scaled = kv->dtype == CSA_E4M3;
    double k_scale = scaled && a->cache->k_scale ? (double)*a->cache->k_scale : 1;
    double v_scale = scaled && a->cache->v_scale ? (double)*a->cache->v_scale : 1;
    double weights[MAX_TOKENS], sum_of_values[CSA_HEAD_SIZE] = {0}, largest;
    for (int64_t i = 0; i < list->count; i++)
        weights[i] = (double)a->scale * k_scale * dot(kv, query, list->kv[i]);
    double sum = softmax(weights, list->count, &largest);
    for (int64_t i = 0; i < list->count; i++)
        for (int j = 0; j < CSA_HEAD_SIZE; j++)
            sum_of_values[j] += weights[i] * kv_element(kv, list->kv[i], CSA_HEAD_SIZE + j);
    for (int j = 0; j < CSA_HEAD_SIZE; j++)
        out[j] = list->count ? csa_float_to_bf16((float)(sum_of_values[j] / sum * v_scale)) : 0;
    if (lse)
        *lse = (float)(largest + log(sum));
}

static void attend_row(void *data, int64_t row)
{
    const csa_attend_args *a = data;
    int64_t groups = a->query.shape[1], token = row / groups, group = row % groups;
    bool active = a->rows ? csa_bool(&a->rows->active, row) : csa_token_active(a->tokens, token);
    int64_t position = a->rows ? csa_i64(&a->rows->positions, row) : csa_token_position(a->tokens, token);
    token_list list = {0};
    if (active && position >= 0)
        list_tokens(a, row, position, &list);
    for (int64_t head = 0; head < a->query.shape[2]; head++) {
        uint16_t *out = csa_at(&a->out, token, group, head);
        float *lse = csa_present(&a->lse) ? csa_at(&a->lse, token, group, head) : NULL;
        attend_head(a, &list, csa_at(&a->query, token, group, head), out, lse);
        if (csa_present(&a->gate) && list.count)
            for (int i = 0; i < CSA_HEAD_SIZE; i++)
                out[i] = csa_ref_gated(out[i], *(const uint16_t *)csa_at(&a->gate, token, group, head));
    }
}

csa_status csa_ref_attend(const csa_context *context, const csa_attend_args *args)
{
    return csa_parallel(context, args->query.shape[0] * args->query.shape[1], attend_row, (void *)args);
}
