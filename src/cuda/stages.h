/*
 * The stages of the cuda back end: one file each, stages.h says what they are given. csa_cuda_load_* load the
 * kernels of a file; a context's creation calls them all.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_STAGES_H
#define CSA_CUDA_STAGES_H

#include "../plan.h"

csa_status csa_cuda_prepare(const csa_context *context, const csa_prepare_args *args);
csa_status csa_cuda_summarize_decode(const csa_context *context, const csa_summarize_args *args);
csa_status csa_cuda_summarize_verify(const csa_context *context, const csa_summarize_args *args);
csa_status csa_cuda_summarize_prefill(const csa_context *context, const csa_summarize_args *args);
csa_status csa_cuda_summarize_metadata(const csa_context *context, const csa_summarize_args *args);
csa_status csa_cuda_score(const csa_context *context, const csa_score_args *args);
csa_status csa_cuda_select(const csa_context *context, const csa_select_args *args);
csa_status csa_cuda_attend(const csa_context *context, const csa_attend_args *args);
csa_status csa_cuda_gate(const csa_context *context, const csa_gate_args *args);
csa_status csa_cuda_step(const csa_context *context, const csa_plan *plan, const csa_step_args *args);

/* Blocks of the largest clusters that select asks for, if the current device takes them; 0: it does not. */
int32_t csa_cuda_most_cluster(void);

extern const csa_compat_stages csa_cuda_compat_stages;

csa_status csa_cuda_load_prepare(void);
csa_status csa_cuda_load_summarize(void);
csa_status csa_cuda_load_score(void);
csa_status csa_cuda_load_select(void);
csa_status csa_cuda_load_attend(void);
csa_status csa_cuda_load_gate(void);
csa_status csa_cuda_load_compat(void);

/* csa_cuda_prepare, then csa_cuda_summarize_decode, or _verify if query_len is more than 1, in one launch where
 * possible. Both describe the same tokens and cache; summarize's key is prepare's index_key_out. */
csa_status csa_cuda_prepare_and_summarize(const csa_context *context, const csa_prepare_args *prepare,
                                          const csa_summarize_args *summarize);

/* ---- What a step asks of score, select and attend beyond their own calls ------------------------ */

/* Tokens [first, first + count) of `tokens` are worked on; tensors of the arguments below start at the first.
 * Score starts when all that is ahead in the stream has ended; kernels behind it may overlap the one ahead. */
struct csa_span {
    int64_t first, count;
};

/* Scores what select will rank and nothing else: no row of up to `width` historical regions, no current region.
 * Leaves the scores' peaks, [row, region / CSA_PEAK], too. */
csa_status csa_cuda_score_span(const csa_context *context, const csa_score_args *args, csa_span span,
                               int64_t width, const csa_tensor *peaks);

/* Does selection from so many rows use their scores' peaks? */
bool csa_cuda_select_wants_peaks(const csa_context *context, int64_t rows, int64_t regions);

/* Selection in a step: current regions follow from the tokens. */
csa_status csa_cuda_select_span(const csa_context *context, const csa_select_args *args,
                                const csa_tokens *tokens, csa_span span, bool overlap, const csa_tensor *peaks);

/* Attention in a step: behind select, with room for so many records of parts of rows. */
csa_status csa_cuda_attend_span(const csa_context *context, const csa_attend_args *args, csa_span span,
                                bool overlap, void *records, int64_t room);

#endif
