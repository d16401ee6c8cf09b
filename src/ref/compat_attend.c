/*
 * Section 6's attention over the token lists of section 9: pages of the cache, or gathered keys and values.
 * Lists may be of any length, so logits are not kept but taken twice. All in double, rounded once, as in
 * attend.c. SPDX-License-Identifier: Apache-2.0
 */
#include "../pages.h"
#include "compat.h"

/* Finds token i of a row. False: it is not there, and contributes nothing. */
typedef bool (*find_token)(const void *args, int64_t row, int64_t i, const uint16_t **key,
                           const uint16_t **value);

typedef struct attention {
    const void *args;
    int64_t (*count)(const void *args, int64_t row); /* of tokens, those that are not there included */
    find_token find;
    const csa_tensor *query, *out, *lse;
    double scale;
} attention;

static double dot(const uint16_t *query, const uint16_t *key)
{
    double sum = 0;
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        sum += (double)csa_bf16_to_float(query[i]) * (double)csa_bf16_to_float(key[i]);
    return sum;
}

/* The largest logit; a NaN need not win, since it makes the sum of weights NaN anyway. */
static double largest_logit(const attention *a, int64_t row, const uint16_t *query, int64_t *tokens)
{
    const uint16_t *key, *value;
    double largest = -INFINITY;
    int64_t count = a->count(a->args, row);
    *tokens = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!a->find(a->args, row, i, &key, &value))
            continue;
        double logit = a->scale * dot(query, key);
        if (logit > largest)
            largest = logit;
        ++*tokens;
    }
    return largest;
}

static double sum_values(const attention *a, int64_t row, const uint16_t *query, double largest, double *sums)
{
    const uint16_t *key, *value;
    double sum = 0;
    int64_t count = a->count(a->args, row);
    for (int64_t i = 0; i < count; i++) {
        if (!a->find(a->args, row, i, &key, &value))
            continue;
        double weight = exp(a->scale * dot(query, key) - largest);
        sum += weight;
        for (int j = 0; j < CSA_HEAD_SIZE; j++)
            sums[j] += weight * (double)csa_bf16_to_float(value[j]);
    }
    return sum;
}

static void attend_head(void *data, int64_t index)
{
    const attention *a = data;
    int64_t heads = a->query->shape[1], row = index / heads, head = index % heads, tokens;
    const uint16_t *query = csa_at(a->query, row, head, 0);
    uint16_t *out = csa_at(a->out, row, head, 0);
    double sums[CSA_HEAD_SIZE] = {0}, largest = largest_logit(a, row, query, &tokens);
    double sum = sum_values(a, row, query, largest, sums);
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        out[i] = tokens ? csa_float_to_bf16((float)(sums[i] / sum)) : 0;
    if (csa_present(a->lse))
        *(float *)csa_at(a->lse, row, head, 0) = (float)(largest + log(sum));
}

static csa_status attend(const csa_context *context, attention *a)
{
    return csa_parallel(context, a->query->shape[0] * a->query->shape[1], attend_head, a);
}

/* ---- Pages -------------------------------------------------------------------------------------- */

static int64_t row_pages(const csa_compat_attend_paged_args *a, int64_t row)
{
    int64_t start = csa_i32(&a->page_indptr, row), left = a->pages.shape[0] - start;
    int64_t count = csa_i32(&a->page_indptr, row + 1) - start;
    if (csa_present(&a->page_counts))
        count = csa_i32(&a->page_counts, row);
    if (start < 0 || count < 0 || left < 0)
        return 0;
    return count < left ? count : left;
}

static int64_t count_paged(const void *args, int64_t row)
{
    const csa_compat_attend_paged_args *a = args;
    int64_t pages = row_pages(a, row), last = csa_i32(&a->last_page_len, row);
    last = last < 0 ? 0 : last > CSA_REGION ? CSA_REGION : last;
    return pages ? (pages - 1) * CSA_REGION + last : 0;
}

static bool find_paged(const void *args, int64_t row, int64_t i, const uint16_t **key, const uint16_t **value)
{
    const csa_compat_attend_paged_args *a = args;
    int64_t page = csa_i32(&a->pages, csa_i32(&a->page_indptr, row) + i / CSA_REGION);
    const uint16_t *first = csa_page_row(&a->cache->kv, page);
    if (!first)
        return false;
    *key = first + i % CSA_REGION * a->cache->kv.stride[2];
    *value = *key + CSA_HEAD_SIZE;
    return true;
}

csa_status csa_ref_compat_attend_paged(const csa_context *context, const csa_compat_attend_paged_args *args)
{
    attention a = {args, count_paged, find_paged, &args->query, &args->out, &args->lse, (double)args->scale};
    return attend(context, &a);
}

/* ---- Gathered rows ------------------------------------------------------------------------------ */

static int64_t count_ragged(const void *args, int64_t row)
{
    const csa_compat_attend_ragged_args *a = args;
    int64_t first = csa_i32(&a->cu_k, row), end = csa_i32(&a->cu_k, row + 1);
    if (end > a->key.shape[0])
        end = a->key.shape[0];
    return first < 0 || end < first ? 0 : end - first;
}

static bool find_ragged(const void *args, int64_t row, int64_t i, const uint16_t **key, const uint16_t **value)
{
    const csa_compat_attend_ragged_args *a = args;
    int64_t token = csa_i32(&a->cu_k, row) + i;
    *key = csa_at(&a->key, token, 0, 0);
    *value = csa_at(&a->value, token, 0, 0);
    return true;
}

csa_status csa_ref_compat_attend_ragged(const csa_context *context, const csa_compat_attend_ragged_args *args)
{
    attention a = {args, count_ragged, find_ragged, &args->query, &args->out, &args->lse, (double)args->scale};
    return attend(context, &a);
}
