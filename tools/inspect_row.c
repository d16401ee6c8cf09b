/*
 * csa inspect: one row.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "inspect.h"
#include "judge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Ranks -------------------------------------------------------------------------------------- */

static bool same_score(float a, float b)
{
    return a == b || (isnan(a) && isnan(b));
}

static bool rank(inspect_row *r, const float *scores)
{
    judge_ranked *places = calloc((size_t)r->ranked + 1, sizeof *places);
    r->order = calloc((size_t)r->ranked + 1, sizeof *r->order);
    for (int64_t i = 0; places && i < r->ranked; i++)
        places[i] = (judge_ranked){scores[i], i};
    if (places)
        qsort(places, (size_t)r->ranked, sizeof *places, judge_by_rank);
    for (int64_t i = 0; places && r->order && i < r->ranked; i++) {
        float score = scores[i];
        r->order[i] = places[i].region;
        r->nan += isnan(score);
        r->plus += isinf(score) && score > 0;
        r->minus += isinf(score) && score < 0;
    }
    free(places);
    return places && r->order;
}

/* ---- The selection ------------------------------------------------------------------------------ */

/* Only the last min(seen, columns) entries are used; one that stands twice is idle the second time. */
static void mark_chosen(inspect_row *r, const int64_t *list, int64_t columns)
{
    int64_t used = r->seen < columns ? r->seen : columns;
    for (int64_t i = columns - used; i < columns; i++) {
        bool sees = list[i] >= 0 && list[i] < r->seen;
        if (!sees || r->chosen[list[i]])
            r->idle += list[i] != -1;
        else
            r->chosen[list[i]] = true;
    }
    for (int64_t i = 0; i < r->ranked; i++)
        r->count += r->chosen[i];
}

static void find_threshold(inspect_row *r, const float *scores)
{
    for (int64_t i = 0; i < r->ranked; i++) {
        int64_t region = r->order[i];
        if (r->chosen[region])
            r->worst = region;
        else if (r->next < 0)
            r->next = region;
    }
    for (int64_t i = 0; r->worst >= 0 && i < r->ranked; i++) {
        bool tie = same_score(scores[i], scores[r->worst]);
        r->ties += tie;
        r->ties_chosen += tie && r->chosen[i];
    }
}

/* How far the list is from the best regions by these scores. */
static void find_difference(inspect_row *r, int64_t topk)
{
    int64_t best = r->ranked < topk ? r->ranked : topk;
    r->differ = 0;
    for (int64_t i = 0; i < r->ranked; i++)
        r->differ += r->chosen[r->order[i]] != (i < best);
}

/* ---- Mass --------------------------------------------------------------------------------------- */

static bool find_mass(inspect_row *r, inspect_view *v)
{
    double *heads = calloc((size_t)(v->heads * r->seen) + 1, sizeof *heads);
    r->mass = calloc((size_t)r->seen + 1, sizeof *r->mass);
    bool ok = heads && r->mass && inspect_mass(v, r->row, heads);
    r->lowest = INFINITY;
    for (int64_t head = 0; ok && head < v->heads; head++) {
        double kept = 0;
        for (int64_t i = 0; i < r->seen; i++) {
            double share = heads[head * r->seen + i];
            r->mass[i] += share / (double)v->heads;
            kept += r->chosen[i] ? share : 0;
        }
        r->kept += kept / (double)v->heads;
        r->lowest = kept < r->lowest || isnan(kept) ? kept : r->lowest;
        r->own += heads[head * r->seen + r->seen - 1] / (double)v->heads;
    }
    free(heads);
    return ok;
}

bool inspect_row_open(inspect_row *r, inspect_view *v, int64_t row)
{
    int64_t seen = inspect_seen(v, row);
    const float *scores = v->scores ? v->scores + row * v->regions : NULL;
    *r = (inspect_row){.row = row, .seen = seen, .worst = -1, .next = -1, .differ = -1};
    r->ranked = seen > 0 ? seen - 1 : 0;
    r->chosen = calloc((size_t)seen + 1, sizeof *r->chosen);
    if (!r->chosen)
        return false;
    mark_chosen(r, v->selected + row * v->columns, v->columns);
    if (scores && !rank(r, scores))
        return false;
    if (scores) {
        find_threshold(r, scores);
        find_difference(r, v->topk < v->regions ? v->topk : v->regions);
    }
    return v->heads == 0 || seen == 0 || find_mass(r, v);
}

void inspect_row_close(inspect_row *r)
{
    free(r->order);
    free(r->chosen);
    free(r->mass);
}
