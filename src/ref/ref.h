/*
 * The reference back end: every stage as SPEC.md says it, in scalar C. Read it beside the specification.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_REF_H
#define CSA_REF_H

#include "../context.h"
#include "../format.h"
#include "../numeric.h"
#include "../tokens.h"

csa_status csa_ref_prepare(const csa_context *context, const csa_prepare_args *args);
csa_status csa_ref_summarize_decode(const csa_context *context, const csa_summarize_args *args);
csa_status csa_ref_summarize_verify(const csa_context *context, const csa_summarize_args *args);
csa_status csa_ref_summarize_prefill(const csa_context *context, const csa_summarize_args *args);
csa_status csa_ref_summarize_metadata(const csa_context *context, const csa_summarize_args *args);
csa_status csa_ref_score(const csa_context *context, const csa_score_args *args);
csa_status csa_ref_select(const csa_context *context, const csa_select_args *args);
csa_status csa_ref_attend(const csa_context *context, const csa_attend_args *args);
csa_status csa_ref_gate(const csa_context *context, const csa_gate_args *args);

/* Section 4's score of one summary. The heads of a query lie `stride` bytes apart. */
float csa_ref_score_summary(const uint8_t *query, int64_t stride, const float *weights, int64_t heads,
                            const uint8_t *summary);

/* bf16(attention * bf16(sigmoid(gate))), section 6. */
uint16_t csa_ref_gated(uint16_t attention, uint16_t gate);

#endif
