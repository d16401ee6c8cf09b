/*
 * The results of a benchmark, compared with the tool's own double precision.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench_stages.h"
#include "judge.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum { VERIFIED_ROWS = 4 /* double precision takes its time */ };

static const double error_bound = 6e-3; /* relative norm, as captures/README.md has it */

typedef struct verification {
    const bench_data *data;
    judge_cache cache;
    judge_norms norms;
} verification;

/* A list of 0 columns is one of all regions: as many as the row sees. */
static void verify_row(verification *v, int64_t row, const int64_t *list, int64_t columns, const uint16_t *out)
{
    const bench_data *d = v->data;
    int64_t groups = d->shape.model.groups, token = row / groups, heads = d->shape.model.heads;
    double exact[JUDGE_HEADS][CSA_HEAD_SIZE];
    judge_attend_args args = {
        .cache = &v->cache,
        .scale = (double)d->attend.scale,
        .heads = (int32_t)heads,
        .columns = columns ? columns : d->positions[token] / CSA_REGION + 1,
        .query = (const uint16_t *)d->attend.query.data + row * heads * CSA_HEAD_SIZE,
        .list = list,
        .gate = columns && d->shape.gate ? (const uint16_t *)d->attend.gate.data + row * heads : NULL,
    };
    judge_row place = judge_row_of(d->owners[token], d->positions[token] + 1, 0);
    judge_attend(&args, place, 0, row % groups, exact);
    for (int64_t h = 0; h < heads; h++)
        judge_norms_add(&v->norms, exact[h], out + (row * heads + h) * CSA_HEAD_SIZE);
}

/* The relative norm over some rows, from the first to the last; NaN if a value is out of place. */
static double verify_rows(bench_data *d, const int64_t *lists, int64_t columns, const uint16_t *out)
{
    verification v = {.data = d,
                      .cache = {.table = d->tokens.block_table,
                                .summaries = d->cache.summaries,
                                .kv = d->cache.kv,
                                .k_scale = 1,
                                .v_scale = 1}};
    int64_t rows = d->count * d->shape.model.groups, some = rows < VERIFIED_ROWS ? rows : VERIFIED_ROWS;
    for (int64_t i = 0; i < some; i++) {
        int64_t row = some > 1 ? i * (rows - 1) / (some - 1) : 0;
        verify_row(&v, row, lists + row * columns, columns, out);
    }
    return v.norms.misplaced || v.norms.nonzero ? (double)NAN : judge_norms_total(&v.norms);
}

static int verify_dense(bench_data *d, bench_run *run)
{
    int64_t regions = (d->shape.model.context - 1) / CSA_REGION + 1;
    int64_t *all = calloc((size_t)regions, sizeof *all);
    if (!all)
        return tool_fail(TOOL_INTERNAL, "bench", "no memory for %" PRId64 " regions", regions);
    for (int64_t i = 0; i < regions; i++)
        all[i] = i;
    int code = bench_run_item(d, BENCH_DENSE);
    run->dense_error = verify_rows(d, all, 0, d->dense.out);
    free(all);
    return code;
}

int bench_verify(bench_data *d, bench_run *run)
{
    int code = bench_prime(d, 1U << BENCH_ATTEND);
    if (code == TOOL_OK)
        code = bench_run_item(d, BENCH_ATTEND);
    if (code != TOOL_OK)
        return code;
    const csa_tensor *lists = &d->attend.selected;
    run->step_error = verify_rows(d, lists->data, lists->shape[1], d->attend.out.data);
    if (d->parts.dense)
        code = verify_dense(d, run);
    run->verified = code == TOOL_OK;
    if (code == TOOL_OK && (!(run->step_error <= error_bound) || !(run->dense_error <= error_bound)))
        return tool_fail(TOOL_CHECK_FAILED, "bench",
                         "attention is %.2g, dense attention %.2g from double precision; %g is allowed",
                         run->step_error, run->dense_error, error_bound);
    return code;
}
