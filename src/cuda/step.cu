/*
 * Whole steps: score, select and attend queued one behind the other, chunk by chunk. In small steps the kernels
 * overlap: each starts while the one ahead ends, and waits before it reads what that one wrote.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../step.h"
#include "../tensor.h"
#include "launch.h"
#include "stages.h"

namespace
{

/* Kernels of a step overlap up to so many rows. Of larger ones, blocks that start early crowd the
 * multiprocessors that are free first: 64 rows at 128K took 93 us to attend to instead of 72. */
enum { OVERLAP_ROWS = 4 };

csa_status run_chunk(const csa_context *context, const csa_step_args *a, csa_span span, int64_t regions,
                     const csa_step_shape *shape, const csa_chunk_arrays *scratch)
{
    int64_t groups = a->query.shape[1], first_row = span.first * groups, rows = span.count * groups;
    csa_rows rows_out = csa_slice_rows(a->rows_out, first_row, rows);
    csa_score_args score = {};
    score.tokens = a->tokens;
    score.cache = a->cache;
    score.query = csa_slice(a->index_query, span.first, span.count);
    score.weights = csa_slice(a->index_weights, span.first, span.count);
    score.rows_out = a->rows_out ? &rows_out : nullptr;
    score.stream = a->stream;
    csa_select_args select = {};
    select.scores = csa_tensor_2d(scratch->scores, CSA_F32, rows, regions);
    select.scores.stride[0] = csa_score_stride(shape);
    select.selected = csa_slice(a->selected, first_row, rows);
    if (!csa_present(&select.selected))
        select.selected = csa_tensor_2d(scratch->selected, CSA_I64, rows, csa_list_columns(shape));
    select.topk = a->topk;
    select.stream = a->stream;
    if (regions > a->topk)
        score.scores = select.scores;
    csa_attend_args attend = {};
    attend.tokens = a->tokens;
    attend.cache = a->cache;
    attend.query = csa_slice(a->query, span.first, span.count);
    attend.selected = select.selected;
    attend.gate = csa_slice(a->gate, span.first, span.count);
    attend.out = csa_slice(a->out, span.first, span.count);
    attend.lse = csa_slice(a->lse, span.first, span.count);
    attend.scale = a->scale;
    attend.stream = a->stream;
    csa_status status = csa_cuda_score_span(context, &score, span, select.selected.shape[1] - 1);
    if (status == CSA_OK)
        status =
            csa_cuda_select_span(context, &select, a->tokens, span, scratch->counters, csa_split_rows(shape));
    if (status == CSA_OK)
        status = csa_cuda_attend_span(context, &attend, span, scratch, csa_split_rows(shape));
    return status;
}

} // namespace

csa_status csa_cuda_step(const csa_context *context, const csa_plan *plan, const csa_step_args *args)
{
    csa_step_shape shape = {args->query.shape[0], args->query.shape[1],   args->regions,
                            args->topk,           context->scratch_limit, true};
    if (shape.tokens == 0)
        return CSA_OK;
    csa_chunk_arrays scratch = csa_lay_out_chunk(&shape, args->workspace.data);
    int64_t chunk_tokens = csa_chunk_tokens(&shape);
    csa_status status = CSA_OK;
    for (int64_t first = 0, chunk = 0; first < shape.tokens && status == CSA_OK;
         first += chunk_tokens, chunk++) {
        int64_t left = shape.tokens - first;
        csa_span span = {first, left < chunk_tokens ? left : chunk_tokens,
                         shape.tokens * shape.groups <= OVERLAP_ROWS};
        int64_t regions = plan ? plan->chunk_regions[chunk] : args->regions;
        status = run_chunk(context, args, span, regions, &shape, &scratch);
    }
    return status;
}
