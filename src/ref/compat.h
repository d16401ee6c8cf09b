/*
 * Section 9 in scalar C: the reference's formats and plans.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_REF_COMPAT_H
#define CSA_REF_COMPAT_H

#include "ref.h"

extern const csa_compat_stages csa_ref_compat_stages;

csa_status csa_ref_compat_pack(const csa_context *context, const csa_compat_pack_args *args, int64_t tokens);
csa_status csa_ref_compat_schedule(const csa_context *context, const csa_compat_schedule_args *args);
csa_status csa_ref_compat_score(const csa_context *context, const csa_compat_score_args *args);
csa_status csa_ref_compat_metadata(const csa_context *context, const csa_compat_metadata_args *args,
                                   int64_t tokens);
csa_status csa_ref_compat_pages(const csa_context *context, const csa_compat_pages_args *args);
csa_status csa_ref_compat_attend_paged(const csa_context *context, const csa_compat_attend_paged_args *args);
csa_status csa_ref_compat_gather(const csa_context *context, const csa_compat_gather_args *args);
csa_status csa_ref_compat_attend_ragged(const csa_context *context, const csa_compat_attend_ragged_args *args);
csa_status csa_ref_compat_stage(const csa_context *context, const csa_compat_stage_args *args);

#endif
