/*
 * The tool's own judgement of results. Plain and slow on purpose.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "judge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Numbers ------------------------------------------------------------------------------------ */

static double from_bf16(uint16_t code)
{
    uint32_t bits = (uint32_t)code << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Sign, 4 bits of exponent with bias 7, 3 of fraction; only 0x7F and 0xFF are no numbers. */
static double decode_e4m3(int code)
{
    int exponent = code >> 3 & 15, fraction = code & 7;
    double size = exponent > 0 ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    if ((code & 0x7F) == 0x7F)
        size = NAN;
    return (code & 0x80) != 0 ? -size : size;
}

static double from_e4m3(uint8_t code)
{
    static double values[256];
    static bool ready;
    for (int i = 0; !ready && i < 256; i++)
        values[i] = decode_e4m3(i);
    ready = true;
    return values[code];
}

double judge_value(csa_dtype dtype, const void *data, int64_t index)
{
    if (dtype == CSA_BF16)
        return from_bf16(((const uint16_t *)data)[index]);
    if (dtype == CSA_F32)
        return (double)((const float *)data)[index];
    return from_e4m3(((const uint8_t *)data)[index]);
}

/* Rounded to a multiple of 2^-fraction of its power of two, or of 2^lowest where that is more. */
static double round_to(double value, int fraction, int lowest)
{
    int exponent;
    frexp(value, &exponent);
    int unit = exponent - 1 - fraction;
    unit = unit < lowest ? lowest : unit;
    return ldexp(nearbyint(ldexp(value, -unit)), unit);
}

double judge_round_bf16(double value)
{
    if (!isfinite(value) || value == 0)
        return value;
    double rounded = round_to(value, 7, -133);
    return fabs(rounded) >= 0x1p128 ? copysign(INFINITY, value) : rounded;
}

uint8_t judge_to_e4m3(double value)
{
    if (isnan(value))
        return 0x7F;
    uint8_t sign = signbit(value) ? 0x80 : 0;
    double size = fabs(value) >= 448 ? 448 : fabs(value);
    size = size > 0 ? round_to(size, 3, -9) : 0;
    int exponent;
    double mantissa = frexp(size, &exponent);
    if (size < ldexp(1, -6))
        return (uint8_t)(sign | (int)ldexp(size, 9));
    return (uint8_t)(sign | (exponent + 6) << 3 | ((int)ldexp(mantissa, 4) - 8));
}

/* Signed magnitudes in numeric order. */
static int64_t in_order(uint32_t code, uint32_t sign)
{
    return (code & sign) != 0 ? -(int64_t)(code & ~sign) : (int64_t)code;
}

static uint32_t code_of(csa_dtype dtype, const void *data, int64_t index)
{
    uint32_t code;
    if (dtype == CSA_BF16)
        return ((const uint16_t *)data)[index];
    if (dtype == CSA_E4M3)
        return ((const uint8_t *)data)[index];
    memcpy(&code, (const float *)data + index, sizeof code);
    return code;
}

static int64_t float_steps(csa_dtype dtype, const void *a, const void *b, int64_t index)
{
    uint32_t x = code_of(dtype, a, index), y = code_of(dtype, b, index);
    bool no_x = isnan(judge_value(dtype, a, index)), no_y = isnan(judge_value(dtype, b, index));
    if (x == y || (no_x && no_y))
        return 0;
    if (no_x || no_y)
        return INT64_MAX;
    uint32_t sign = dtype == CSA_BF16 ? 0x8000 : dtype == CSA_E4M3 ? 0x80 : 0x80000000;
    int64_t steps = llabs(in_order(x, sign) - in_order(y, sign));
    return steps > 0 ? steps : 1;
}

int64_t judge_steps(csa_dtype dtype, const void *a, const void *b, int64_t index)
{
    bool same;
    switch (dtype) {
    case CSA_I64:
        same = ((const int64_t *)a)[index] == ((const int64_t *)b)[index];
        break;
    case CSA_I32:
        same = ((const int32_t *)a)[index] == ((const int32_t *)b)[index];
        break;
    case CSA_BOOL:
        same = (((const uint8_t *)a)[index] != 0) == (((const uint8_t *)b)[index] != 0);
        break;
    case CSA_U8:
        same = ((const uint8_t *)a)[index] == ((const uint8_t *)b)[index];
        break;
    default:
        return float_steps(dtype, a, b, index);
    }
    return same ? 0 : INT64_MAX;
}

/* ---- Rows --------------------------------------------------------------------------------------- */

judge_row judge_row_of(int64_t request, int64_t seen, int64_t slot)
{
    bool active = slot >= 0 && seen > 0;
    return (judge_row){active, active ? seen - 1 : 0, request};
}

/* The block that holds a region of a request, -1 if none does. */
static int64_t find_block(const csa_tensor *table, int64_t request, int64_t region, int64_t per_block,
                          int64_t blocks)
{
    int64_t columns = table->shape[1], column = region / per_block;
    if (request < 0 || request >= table->shape[0] || region < 0 || column >= columns)
        return -1;
    int64_t block = ((const int32_t *)table->data)[request * columns + column];
    return block >= 0 && block < blocks ? block : -1;
}

/* ---- Scores ------------------------------------------------------------------------------------- */

void judge_load_query(judge_query *query, csa_dtype dtype, const void *values, const float *weights,
                      int64_t row, int64_t stored, int32_t heads)
{
    query->heads = heads;
    for (int32_t h = 0; h < heads; h++) {
        query->weight[h] = weights[row * stored + h];
        for (int64_t i = 0; i < CSA_SUMMARY_SIZE; i++) {
            double value = judge_value(dtype, values, (row * stored + h) * CSA_SUMMARY_SIZE + i);
            query->value[h][i] = dtype == CSA_E4M3 ? value : from_e4m3(judge_to_e4m3(value));
        }
    }
}

const uint8_t *judge_summary(const judge_cache *cache, int64_t request, int64_t region)
{
    const csa_tensor *summaries = &cache->summaries;
    int64_t per_block = summaries->shape[1];
    int64_t block = find_block(&cache->table, request, region, per_block, summaries->shape[0]);
    if (block < 0)
        return NULL;
    return (const uint8_t *)summaries->data + (block * per_block + region % per_block) * CSA_SUMMARY_SIZE;
}

void judge_score(const judge_query *query, const uint8_t *key, float *score, double *bound)
{
    float chains[4] = {0};
    double value[CSA_SUMMARY_SIZE], sizes = 0;
    *score = 0;
    *bound = ldexp(1, -140);
    if (key == NULL)
        return;
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        value[i] = from_e4m3(key[i]);
    for (int32_t h = 0; h < query->heads; h++) {
        double dot = 0, size = 0;
        for (int i = 0; i < CSA_SUMMARY_SIZE; i++) {
            double product = query->value[h][i] * value[i];
            dot += product;
            size += fabs(product);
        }
        chains[h % 4] = fmaf(query->weight[h], dot > 0 ? (float)dot : 0.0F, chains[h % 4]);
        sizes += isnan(dot) ? 0 : fabs((double)query->weight[h]) * size;
    }
    *score = ((chains[0] + chains[1]) + chains[2]) + chains[3];
    *bound += ldexp(sizes, -18);
}

bool judge_score_within(float got, float score, double bound)
{
    if (isfinite(got) && isfinite(score))
        return fabs((double)got - (double)score) <= bound;
    return got == score || (isnan(got) && isnan(score));
}

/* ---- Selection ---------------------------------------------------------------------------------- */

int judge_by_rank(const void *a, const void *b)
{
    const judge_ranked *x = a, *y = b;
    bool no_x = isnan(x->score), no_y = isnan(y->score);
    if (no_x != no_y)
        return no_x ? 1 : -1;
    if (!no_x && x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->region < y->region ? -1 : x->region > y->region;
}

static int by_region(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

bool judge_select(const float *scores, int64_t regions, int64_t current, int64_t topk, int64_t *selected)
{
    int64_t width = topk < regions ? topk : regions;
    for (int64_t i = 0; i <= width; i++)
        selected[i] = -1;
    current = current < regions ? current : regions - 1;
    if (current < 0)
        return true;
    int64_t kept = current < width ? current : width;
    int64_t *list = selected + width - kept;
    list[kept] = current;
    for (int64_t i = 0; kept == current && i < kept; i++)
        list[i] = i;
    if (kept == current)
        return true;
    judge_ranked *all = malloc((size_t)current * sizeof *all);
    if (all == NULL)
        return false;
    for (int64_t r = 0; r < current; r++)
        all[r] = (judge_ranked){scores[r], r};
    qsort(all, (size_t)current, sizeof *all, judge_by_rank);
    for (int64_t i = 0; i < kept; i++)
        list[i] = all[i].region;
    qsort(list, (size_t)kept, sizeof *list, by_region);
    free(all);
    return true;
}

/* ---- Attention ---------------------------------------------------------------------------------- */

int64_t judge_cache_row(const judge_cache *cache, int64_t request, int64_t group, int64_t token)
{
    const csa_tensor *kv = &cache->kv;
    int64_t block_size = kv->shape[2];
    int64_t block =
        find_block(&cache->table, request, token / CSA_REGION, block_size / CSA_REGION, kv->shape[0]);
    if (block < 0)
        return -1;
    return ((block * kv->shape[1] + group) * block_size + token % block_size) * CSA_KV_SIZE;
}

/* What one row has gathered so far. */
typedef struct row_sums {
    double query[JUDGE_HEADS][CSA_HEAD_SIZE];
    double largest[JUDGE_HEADS]; /* logit */
    double weights[JUDGE_HEADS];
    int64_t tokens;
} row_sums;

static double logit_of(const judge_attend_args *args, const row_sums *sums, int32_t head, const double *key)
{
    double dot = 0;
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        dot += sums->query[head][i] * key[i];
    return args->scale * args->cache->k_scale * dot;
}

/* The first pass finds the largest logits, the second adds up weights and weighted values. */
static void add_token(const judge_attend_args *args, row_sums *sums, int64_t place, bool second,
                      double out[JUDGE_HEADS][CSA_HEAD_SIZE])
{
    const csa_tensor *kv = &args->cache->kv;
    double row[CSA_KV_SIZE];
    for (int i = 0; i < CSA_KV_SIZE; i++)
        row[i] = judge_value(kv->dtype, kv->data, place + i);
    for (int32_t h = 0; h < args->heads; h++) {
        double logit = logit_of(args, sums, h, row);
        if (!second) {
            sums->largest[h] = fmax(sums->largest[h], logit);
            continue;
        }
        double weight = exp(logit - sums->largest[h]);
        sums->weights[h] += weight;
        for (int i = 0; i < CSA_HEAD_SIZE; i++)
            out[h][i] += weight * row[CSA_HEAD_SIZE + i];
    }
    sums->tokens++;
}

static void add_tokens(const judge_attend_args *args, row_sums *sums, judge_row row, int64_t number,
                       int64_t group, bool second, double out[JUDGE_HEADS][CSA_HEAD_SIZE])
{
    const int64_t *list = args->list + number * args->columns;
    int64_t current = row.position / CSA_REGION;
    int64_t used = current + 1 < args->columns ? current + 1 : args->columns;
    for (int64_t e = args->columns - used; e < args->columns; e++) {
        if (list[e] < 0 || list[e] > current)
            continue;
        for (int i = 0; i < CSA_REGION && list[e] * CSA_REGION + i <= row.position; i++) {
            int64_t place = judge_cache_row(args->cache, row.request, group, list[e] * CSA_REGION + i);
            if (place >= 0)
                add_token(args, sums, place, second, out);
        }
    }
}

void judge_attend(const judge_attend_args *args, judge_row row, int64_t number, int64_t group,
                  double out[JUDGE_HEADS][CSA_HEAD_SIZE])
{
    row_sums sums = {.tokens = 0};
    memset(out, 0, sizeof(double[JUDGE_HEADS][CSA_HEAD_SIZE]));
    if (!row.active)
        return;
    for (int32_t h = 0; h < args->heads; h++) {
        sums.largest[h] = -INFINITY;
        for (int64_t i = 0; i < CSA_HEAD_SIZE; i++)
            sums.query[h][i] = from_bf16(args->query[(number * args->heads + h) * CSA_HEAD_SIZE + i]);
    }
    add_tokens(args, &sums, row, number, group, false, out);
    bool empty = sums.tokens == 0;
    add_tokens(args, &sums, row, number, group, true, out);
    for (int32_t h = 0; h < args->heads; h++) {
        double factor = empty ? 1 : args->cache->v_scale / sums.weights[h];
        if (args->gate != NULL)
            factor *= judge_round_bf16(1 / (1 + exp(-from_bf16(args->gate[number * args->heads + h]))));
        for (int i = 0; i < CSA_HEAD_SIZE; i++)
            out[h][i] *= factor;
    }
}

/* Near the largest bf16 number, which rounding may push over it. */
static bool may_overflow(double exact)
{
    return fabs(exact) > 0x1p128 * (1 - 0x1p-6);
}

static bool may_have_overflown(double got)
{
    return fabs(got) > 0x1p128 * (1 - 0x1p-5);
}

/* Are both finite, or the same infinity, or both NaN? */
static bool same_place(double exact, double got)
{
    if (isnan(exact) || isnan(got))
        return isnan(exact) && isnan(got);
    if (may_overflow(exact) || isinf(got))
        return may_overflow(exact) && may_have_overflown(got) && signbit(exact) == signbit(got);
    return true;
}

void judge_norms_add(judge_norms *norms, const double exact[CSA_HEAD_SIZE], const uint16_t got[CSA_HEAD_SIZE])
{
    double error = 0, size = 0;
    bool zero = true;
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        zero &= exact[i] == 0;
    for (int i = 0; i < CSA_HEAD_SIZE; i++) {
        double value = from_bf16(got[i]), off = fabs(value - exact[i]);
        norms->nonzero += zero && !(value == 0);
        if (!same_place(exact[i], value))
            norms->misplaced++;
        if (!isfinite(exact[i]) || !isfinite(value) || may_overflow(exact[i]))
            continue;
        error += off < 0x1p-126 ? 0 : off * off;
        size += exact[i] * exact[i];
    }
    norms->error += error;
    norms->size += size;
    if (error > 0)
        norms->worst = fmax(norms->worst, sqrt(error / size));
}

double judge_norms_total(const judge_norms *norms)
{
    return norms->error > 0 ? sqrt(norms->error / norms->size) : 0;
}
