/*
 * csa inspect: where the softmax mass of dense attention lies. Exact arithmetic of the tool's own.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "inspect.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- A recorded context ------------------------------------------------------------------------- */

static void context_mass(inspect_view *v, int64_t row, double *mass)
{
    int64_t query = row / v->groups, seen = inspect_seen(v, row);
    if (v->exact_query != query)
        exact_dense(&v->exact, query);
    v->exact_query = query;
    for (int64_t head = 0; head < v->heads; head++)
        exact_add_mass(&v->exact, query, row % v->groups * v->heads + head, mass + head * seen);
}

/* ---- A paged cache ------------------------------------------------------------------------------ */

/* Logits of a head; -inf for a token that no block holds. */
static void find_logits(const inspect_view *v, int64_t row, int64_t head, int64_t tokens, double *logits)
{
    const judge_attend_args *a = &v->attention.judge;
    const csa_tensor *kv = &a->cache->kv;
    double query[CSA_HEAD_SIZE];
    for (int64_t i = 0; i < CSA_HEAD_SIZE; i++)
        query[i] = judge_value(CSA_BF16, a->query, (row * v->heads + head) * CSA_HEAD_SIZE + i);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t place = judge_cache_row(a->cache, v->places[row].request, row % v->groups, t);
        double dot = 0;
        for (int64_t i = 0; place >= 0 && i < CSA_HEAD_SIZE; i++)
            dot += query[i] * judge_value(kv->dtype, kv->data, place + i);
        logits[t] = place >= 0 ? a->scale * a->cache->k_scale * dot : -INFINITY;
    }
}

/* The softmax of logits, summed over each region. */
static void add_shares(const double *logits, int64_t tokens, double *mass)
{
    double max = -INFINITY, sum = 0;
    for (int64_t t = 0; t < tokens; t++)
        max = logits[t] > max || isnan(logits[t]) ? logits[t] : max;
    for (int64_t t = 0; t < tokens; t++)
        sum += logits[t] == -INFINITY ? 0 : exp(logits[t] - max);
    for (int64_t t = 0; t < tokens; t++)
        mass[t / CSA_REGION] += logits[t] == -INFINITY ? 0 : exp(logits[t] - max) / sum;
}

bool inspect_mass(inspect_view *v, int64_t row, double *mass)
{
    int64_t seen = inspect_seen(v, row), tokens = seen * CSA_REGION, position = v->places[row].position;
    memset(mass, 0, (size_t)(v->heads * seen) * sizeof *mass);
    if (v->exact.source) {
        context_mass(v, row, mass);
        return true;
    }
    tokens = tokens < position + 1 ? tokens : position + 1;
    double *logits = calloc((size_t)tokens + 1, sizeof *logits);
    for (int64_t head = 0; logits && head < v->heads; head++) {
        find_logits(v, row, head, tokens, logits);
        add_shares(logits, tokens, mass + head * seen);
    }
    free(logits);
    return logits != NULL;
}
