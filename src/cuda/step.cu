/*
 * Whole steps: score, select and attend queued one behind the other, chunk by chunk. Those behind score overlap
 * the kernel ahead: they start while it ends, and wait before they read what it wrote. Score itself does not,
 * so that what was written before a chunk may be read at any time. SPDX-License-Identifier: Apache-2.0
 */
#include "../step.h"
#include "../tensor.h"
#include "launch.h"
#include "stages.h"

namespace
{

csa_status run_chunk(const csa_context *context, const csa_step_args *a, const csa_chunk *chunk)
{
    int64_t groups = a->query.shape[1], first_row = chunk->first * groups, rows = chunk->count * groups;
    csa_span span = {chunk->first, chunk->count};
    csa_rows rows_out = csa_slice_rows(a->rows_out, first_row, rows);
    csa_score_args score = {};
    score.tokens = a->tokens;
    score.cache = a->cache;
    score.query = csa_slice(a->index_query, span.first, span.count);
    score.weights = csa_slice(a->index_weights, span.first, span.count);
    score.rows_out = a->rows_out ? &rows_out : nullptr;
    score.stream = a->stream;
    csa_select_args select = {};
    select.scores = csa_tensor_2d(chunk->scratch.scores, CSA_F32, rows, chunk->regions);
    select.scores.stride[0] = csa_score_stride(chunk->shape);
    select.selected = csa_slice(a->selected, first_row, rows);
    if (!csa_present(&select.selected))
        select.selected = csa_tensor_2d(chunk->scratch.selected, CSA_I64, rows, csa_list_columns(chunk->shape));
    select.topk = a->topk;
    select.stream = a->stream;
    if (chunk->regions > a->topk)
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
    csa_tensor peaks = {};
    if (csa_peak_stride(chunk->shape) > 0 && csa_peak_rows(chunk->shape, rows) == rows &&
        csa_cuda_select_wants_peaks(context, rows, chunk->regions))
        peaks = csa_tensor_2d(chunk->scratch.peaks, CSA_F32, rows, csa_peak_stride(chunk->shape));
    /* Select reads the tokens before it waits: without a kernel of score, what is ahead may be writing them. */
    bool behind_score = a->rows_out || chunk->regions > a->topk;
    csa_status status = csa_cuda_score_span(context, &score, span, select.selected.shape[1] - 1, &peaks);
    if (status == CSA_OK)
        status = csa_cuda_select_span(context, &select, a->tokens, span, behind_score, &peaks);
    if (status == CSA_OK)
        status = csa_cuda_attend_span(context, &attend, span, true, chunk->scratch.records,
                                      csa_record_count(chunk->shape));
    return status;
}

} // namespace

csa_status csa_cuda_step(const csa_context *context, const csa_plan *plan, const csa_step_args *args)
{
    csa_status status = csa_cuda_check_rows(args->query.shape[0], args->query.shape[1]);
    return status == CSA_OK ? csa_run_chunks(context, plan, args, run_chunk) : status;
}
