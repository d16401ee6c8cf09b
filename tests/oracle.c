/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

/* ---- Section 3 ---------------------------------------------------------------------------------- */

static int64_t at64(const csa_tensor *t, int64_t i, int64_t j)
{
    return *(const int64_t *)tensor_at(t, i, j, 0, 0);
}

/* One region's softmax, fp32 and in position order as the text has it. */
static void summary_of_rows(const uint16_t *const *keys, const uint16_t *const *zs, int rows, uint8_t *summary)
{
    float max = -INFINITY, num[CSA_SUMMARY_SIZE] = {0}, den[CSA_SUMMARY_SIZE] = {0};
    for (int row = 0; row < rows; row++) {
        float largest = max;
        bool nan = isnan(max);
        for (int i = 0; i < CSA_SUMMARY_SIZE; i++) {
            nan = nan || isnan(bf16_value(zs[row][i]));
            largest = bf16_value(zs[row][i]) > largest ? bf16_value(zs[row][i]) : largest;
        }
        largest = nan ? NAN : largest;
        for (int i = 0; i < CSA_SUMMARY_SIZE; i++) {
            float old = 0, weight = expf(bf16_value(zs[row][i]) - largest), product;
            if (den[i] > 0)
                old = expf(max - largest);
            product = weight * bf16_value(keys[row][i]);
            num[i] = num[i] * old;
            num[i] = num[i] + product;
            den[i] = den[i] * old;
            den[i] = den[i] + weight;
        }
        max = largest;
    }
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++) {
        float below = den[i] >= 1e-20F ? den[i] : 1e-20F;
        summary[i] = e4m3_code(bf16_rounded(num[i] / below));
    }
}

typedef struct rows_of_region {
    const uint16_t *keys[CSA_REGION], *zs[CSA_REGION];
    int count;
    bool missing;
} rows_of_region;

static uint16_t *ring_at(const csa_summarize_args *a, int64_t request, int64_t position)
{
    if (a->cache->ring.ndim == 0 || a->tokens->ring_base.ndim == 0)
        return NULL;
    int64_t base = at64(&a->tokens->ring_base, request, 0), row = base + position % a->cache->ring_capacity;
    return base < 0 || row >= a->cache->ring.shape[0] ? NULL : tensor_at(&a->cache->ring, row, 0, 0, 0);
}

static void add_ring(const csa_summarize_args *a, int64_t request, int64_t position, rows_of_region *rows)
{
    const uint16_t *row = ring_at(a, request, position);
    rows->missing = rows->missing || !row;
    rows->keys[rows->count] = row;
    rows->zs[rows->count++] = row ? row + CSA_SUMMARY_SIZE : NULL;
}

static void add_token(const csa_summarize_args *a, int64_t token, rows_of_region *rows)
{
    rows->keys[rows->count] = tensor_at(&a->key, token, 0, 0, 0);
    rows->zs[rows->count++] = tensor_at(&a->z, token, 0, 0, 0);
}

static void store_ring(const csa_summarize_args *a, int64_t request, int64_t position, int64_t token)
{
    uint16_t *row = ring_at(a, request, position);
    for (int i = 0; row && i < CSA_SUMMARY_SIZE; i++) {
        row[i] = *(uint16_t *)tensor_at(&a->key, token, i, 0, 0);
        row[CSA_SUMMARY_SIZE + i] = *(uint16_t *)tensor_at(&a->z, token, i, 0, 0);
    }
}

static void write_summary(const csa_summarize_args *a, int64_t slot, const rows_of_region *rows)
{
    int64_t block_size = a->cache->summaries.shape[1] * CSA_REGION;
    if (rows->missing || slot / block_size >= a->cache->summaries.shape[0])
        return;
    uint8_t summary[CSA_SUMMARY_SIZE];
    summary_of_rows(rows->keys, rows->zs, rows->count, summary);
    memcpy(tensor_at(&a->cache->summaries, slot / block_size, slot % block_size / CSA_REGION, 0, 0), summary,
           sizeof summary);
}

static bool is_active(const csa_summarize_args *a, int64_t token)
{
    return at64(&a->tokens->slots, token, 0) >= 0 && at64(&a->tokens->positions, token, 0) >= 0;
}

static void one_token(csa_op op, const csa_summarize_args *a, int64_t request, int64_t token)
{
    rows_of_region rows = {.count = 0};
    int64_t position = at64(&a->tokens->positions, token, 0);
    bool verify = op == CSA_OP_SUMMARIZE_VERIFY, closing = position % CSA_REGION == 7;
    if (!is_active(a, token))
        return;
    if (verify || !closing)
        store_ring(a, request, position, token);
    if (!closing)
        return;
    for (int64_t p = position - 7; p < position + verify; p++)
        add_ring(a, request, p, &rows);
    if (!verify)
        add_token(a, token, &rows);
    write_summary(a, at64(&a->tokens->slots, token, 0), &rows);
}

/* Members of the run that begins at `token`, per offset in the region, -1 where none is active. */
static void find_members(const csa_summarize_args *a, int64_t token, int64_t end, int64_t *row)
{
    int64_t region = at64(&a->tokens->positions, token, 0) / CSA_REGION;
    for (int64_t t = token; t < end && at64(&a->tokens->positions, t, 0) / CSA_REGION == region; t++) {
        if (!is_active(a, t))
            continue;
        int64_t offset = at64(&a->tokens->positions, t, 0) % CSA_REGION;
        if (row[1] == CSA_REGION) {
            row[0] = at64(&a->tokens->slots, t, 0) / CSA_REGION;
            row[1] = offset;
        }
        row[2 + offset] = t;
    }
}

static bool starts_run(const csa_summarize_args *a, int64_t token, int64_t first)
{
    const csa_tensor *positions = &a->tokens->positions;
    return token == first ||
           at64(positions, token, 0) / CSA_REGION != at64(positions, token - 1, 0) / CSA_REGION;
}

static void close_run(const csa_summarize_args *a, int64_t request, const int64_t *row)
{
    rows_of_region rows = {.count = 0};
    int64_t last = row[2 + 7];
    if (last < 0)
        return;
    for (int64_t offset = 0; offset < CSA_REGION; offset++)
        if (offset < row[1])
            add_ring(a, request, at64(&a->tokens->positions, last, 0) - 7 + offset, &rows);
        else if (row[2 + offset] >= 0)
            add_token(a, row[2 + offset], &rows);
    write_summary(a, row[0] * CSA_REGION, &rows);
}

static void prefill_request(csa_op op, const csa_summarize_args *a, int64_t request, int64_t first, int64_t end)
{
    for (int64_t token = first; token < end; token++) {
        int64_t row[10] = {-1, CSA_REGION, -1, -1, -1, -1, -1, -1, -1, -1};
        if (starts_run(a, token, first))
            find_members(a, token, end, row);
        for (int i = 0; op == CSA_OP_SUMMARIZE_METADATA && i < 10; i++)
            *(int64_t *)tensor_at(&a->metadata, token, i, 0, 0) = row[i];
        if (op == CSA_OP_SUMMARIZE_PREFILL)
            close_run(a, request, row);
    }
    for (int64_t token = first; op == CSA_OP_SUMMARIZE_PREFILL && token < end; token++) {
        int64_t context = at64(&a->tokens->positions, end - 1, 0) + 1;
        int64_t position = at64(&a->tokens->positions, token, 0);
        if (is_active(a, token) && position >= context - a->cache->ring_capacity)
            store_ring(a, request, position, token);
    }
}

void oracle_summarize(csa_op op, const csa_summarize_args *a)
{
    int64_t tokens = a->tokens->slots.shape[0], requests = a->tokens->block_table.shape[0];
    bool prefill = op == CSA_OP_SUMMARIZE_PREFILL || op == CSA_OP_SUMMARIZE_METADATA;
    for (int64_t token = 0; op == CSA_OP_SUMMARIZE_METADATA && token < tokens; token++)
        for (int i = 0; i < 10; i++)
            *(int64_t *)tensor_at(&a->metadata, token, i, 0, 0) = i == 1 ? CSA_REGION : -1;
    for (int64_t request = 0; request < requests; request++) {
        int64_t first = request * a->tokens->query_len, end = first + a->tokens->query_len;
        if (a->tokens->query_start.ndim) {
            first = *(int32_t *)tensor_at(&a->tokens->query_start, request, 0, 0, 0);
            end = *(int32_t *)tensor_at(&a->tokens->query_start, request + 1, 0, 0, 0);
        }
        if (prefill)
            prefill_request(op, a, request, first, end);
        for (int64_t token = first; !prefill && token < end; token++)
            one_token(op, a, request, token);
    }
}

/* ---- Section 4 ---------------------------------------------------------------------------------- */

/* Multiples of 2^-9 that an e4m3 code stands for; exact. */
static int64_t e4m3_steps(uint8_t code)
{
    return (int64_t)(e4m3_value(code) * 512);
}

float oracle_score(const csa_score_args *a, int64_t token, int64_t group, const uint8_t *summary, double *bound)
{
    int64_t heads = a->query.shape[2], padded = heads < 4 ? 4 : heads < 8 ? 8 : heads;
    float chains[4] = {0, 0, 0, 0};
    *bound = 0x1p-140;
    for (int64_t h = 0; h < padded; h++) {
        const uint8_t *query = h < heads ? tensor_at(&a->query, token, group, h, 0) : NULL;
        float weight = h < heads ? *(float *)tensor_at(&a->weights, token, group, h, 0) : 0;
        int64_t sum = 0, magnitude = 0; /* in steps of 2^-18: at most 2^44 */
        bool nan = false;
        for (int i = 0; query && i < CSA_SUMMARY_SIZE; i++) {
            nan = nan || isnan(e4m3_value(query[i])) || isnan(e4m3_value(summary[i]));
            if (nan)
                break;
            int64_t product = e4m3_steps(query[i]) * e4m3_steps(summary[i]);
            sum += product;
            magnitude += product < 0 ? -product : product;
        }
        float dot = nan || sum < 0 ? 0 : (float)ldexp((double)sum, -18);
        chains[h % 4] = fmaf(weight, dot, chains[h % 4]);
        *bound += nan ? 0 : fabs((double)weight) * ldexp((double)magnitude, -36);
    }
    float joined = chains[0] + chains[1];
    joined = joined + chains[2];
    return joined + chains[3];
}

/* ---- Section 5 ---------------------------------------------------------------------------------- */

/* How many of the candidates stand before this one: larger, or equal with a smaller number; NaN behind all. */
static int64_t rank_of(const float *scores, int64_t candidates, int64_t region)
{
    int64_t rank = 0;
    for (int64_t other = 0; other < candidates; other++) {
        bool mine = isnan(scores[region]), its = isnan(scores[other]);
        bool equal = mine ? its : scores[other] == scores[region];
        bool better = mine ? !its : scores[other] > scores[region];
        rank += better || (equal && other < region);
    }
    return rank;
}

void oracle_select(const float *scores, int64_t regions, int64_t current, int64_t topk, int64_t *list)
{
    int64_t width = topk < regions ? topk : regions, next = width;
    current = current < regions ? current : regions - 1;
    for (int64_t i = 0; i <= width; i++)
        list[i] = -1;
    if (current < 0)
        return;
    list[next--] = current;
    for (int64_t region = current - 1; region >= 0; region--)
        if (regions <= topk || rank_of(scores, current, region) < width)
            list[next--] = region;
}

/* ---- Section 6 ---------------------------------------------------------------------------------- */

double oracle_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* The cache row of a request's token, NULL if its block is not there. */
static const void *cached(const csa_attend_args *a, int64_t request, int64_t group, int64_t position)
{
    const csa_tensor *kv = &a->cache->kv, *table = &a->tokens->block_table;
    int64_t size = kv->shape[2], column = position / size;
    if (column >= table->shape[1])
        return NULL;
    int32_t block = *(const int32_t *)tensor_at(table, request, column, 0, 0);
    return block < 0 || block >= kv->shape[0] ? NULL : tensor_at(kv, block, group, position % size, 0);
}

static double kv_value(const csa_attend_args *a, const void *row, int i)
{
    if (a->cache->kv.dtype == CSA_E4M3)
        return (double)e4m3_value(((const uint8_t *)row)[i]);
    return (double)bf16_value(((const uint16_t *)row)[i]);
}

/* q . k in *sum, and the sum of |q_i k_i|. */
static double dot(const csa_attend_args *a, const uint16_t *query, const void *row, double *sum)
{
    double magnitude = 0;
    *sum = 0;
    for (int i = 0; i < CSA_HEAD_SIZE; i++) {
        double product = (double)bf16_value(query[i]) * kv_value(a, row, i);
        *sum += product;
        magnitude += fabs(product);
    }
    return magnitude;
}

/* The cache rows of the tokens of a row's list. */
static int64_t list_rows(const csa_attend_args *a, int64_t request, int64_t position, int64_t row,
                         const void **rows)
{
    int64_t columns = a->selected.shape[1], live = position / CSA_REGION + 1, count = 0;
    for (int64_t c = live < columns ? columns - live : 0; position >= 0 && request >= 0 && c < columns; c++) {
        int64_t region = *(const int64_t *)tensor_at(&a->selected, row, c, 0, 0);
        if (region < 0 || region > position / CSA_REGION)
            continue;
        for (int64_t p = region * CSA_REGION; p < region * CSA_REGION + CSA_REGION && p <= position; p++) {
            const void *found = cached(a, request, row % a->query.shape[1], p);
            if (found)
                rows[count++] = found;
        }
    }
    return count;
}

void oracle_attend(const csa_attend_args *a, int64_t request, int64_t position, int64_t row, int64_t head,
                   oracle_attention *result)
{
    int64_t columns = a->selected.shape[1], groups = a->query.shape[1];
    bool scaled = a->cache->kv.dtype == CSA_E4M3;
    double k_scale = scaled ? (double)*a->cache->k_scale : 1, v_scale = scaled ? (double)*a->cache->v_scale : 1;
    double *logits = calloc((size_t)columns * CSA_REGION, sizeof *logits), max = -(double)INFINITY, sum = 0;
    const void **rows = calloc((size_t)columns * CSA_REGION, sizeof *rows);
    const uint16_t *query = tensor_at(&a->query, row / groups, row % groups, head, 0);
    memset(result, 0, sizeof *result);
    int64_t count = result->tokens = list_rows(a, request, position, row, rows);
    for (int64_t i = 0; i < count; i++) {
        double q_k, magnitude = dot(a, query, rows[i], &q_k) * fabs((double)a->scale) * k_scale;
        logits[i] = q_k * (double)a->scale * k_scale;
        max = logits[i] > max ? logits[i] : max;
        result->lse_bound = magnitude > result->lse_bound ? magnitude : result->lse_bound;
    }
    for (int64_t i = 0; i < count; i++)
        sum += exp(logits[i] - max);
    for (int64_t i = 0; i < count; i++)
        for (int j = 0; j < CSA_HEAD_SIZE; j++) {
            double part = exp(logits[i] - max) / sum * kv_value(a, rows[i], CSA_HEAD_SIZE + j) * v_scale;
            result->out[j] += part;
            result->magnitude[j] += fabs(part);
        }
    result->lse = count ? max + log(sum) : -(double)INFINITY;
    result->lse_bound = (1 + result->lse_bound) * 0x1p-16;
    free(logits);
    free(rows);
}

/* ---- Section 2 ---------------------------------------------------------------------------------- */

static double weight_at(const csa_tensor *t, int i)
{
    return tensor_value(t, i, 0, 0, 0);
}

static double rounded(double x)
{
    return (double)bf16_rounded((float)x);
}

static void normalise(const uint16_t *x, int n, const oracle_norm *how, double *y)
{
    double mean = 0, squares = 0;
    for (int i = 0; how->bias && i < n; i++)
        mean += (double)bf16_value(x[i]) / n;
    for (int i = 0; i < n; i++)
        squares += ((double)bf16_value(x[i]) - mean) * ((double)bf16_value(x[i]) - mean) / n;
    for (int i = 0; i < n; i++) {
        double normed = ((double)bf16_value(x[i]) - mean) / sqrt(squares + how->eps);
        if (how->rounds_twice && !how->zero_centered)
            normed = rounded(normed);
        double weight = weight_at(how->weight, i) + (how->zero_centered && !how->bias ? 1 : 0);
        y[i] = rounded(normed * weight + (how->bias ? weight_at(how->bias, i) : 0));
    }
}

void oracle_prepare(const uint16_t *x, int n, const oracle_norm *how, double *out, double *tolerance)
{
    double y[CSA_SUMMARY_SIZE];
    normalise(x, n, how, y);
    for (int i = 0; i < n; i++) {
        out[i] = y[i];
        tolerance[i] = fabs(y[i]) * 0x1p-7 + 1e-5;
    }
    int64_t half = how->table ? how->table->shape[1] / 2 : 0;
    for (int64_t i = 0; i < half; i++) {
        double cosine = tensor_value(how->table, how->position, i, 0, 0);
        double sine = tensor_value(how->table, how->position, half + i, 0, 0);
        double low_cos = y[i] * cosine, high_sin = y[half + i] * sine;
        double high_cos = y[half + i] * cosine, low_sin = y[i] * sine;
        tolerance[i] = (fabs(low_cos) + fabs(high_sin)) * 0x1p-6 + 1e-5;
        tolerance[half + i] = (fabs(high_cos) + fabs(low_sin)) * 0x1p-6 + 1e-5;
        if (how->native_rope) {
            low_cos = rounded(low_cos);
            high_sin = rounded(high_sin);
            high_cos = rounded(high_cos);
            low_sin = rounded(low_sin);
        }
        out[i] = rounded(low_cos - high_sin);
        out[half + i] = rounded(high_cos + low_sin);
    }
}
