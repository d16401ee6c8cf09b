/*
 * Section 9 on a GPU: the reference's formats and plans. Correct and parallel; our own steps need none of it.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_COMPAT_H
#define CSA_CUDA_COMPAT_H

#include "stages.h"

csa_status csa_cuda_compat_pack(const csa_context *context, const csa_compat_pack_args *args, int64_t tokens);
csa_status csa_cuda_compat_schedule(const csa_context *context, const csa_compat_schedule_args *args);
csa_status csa_cuda_compat_score(const csa_context *context, const csa_compat_score_args *args);
csa_status csa_cuda_compat_metadata(const csa_context *context, const csa_compat_metadata_args *args,
                                    int64_t tokens);
csa_status csa_cuda_compat_pages(const csa_context *context, const csa_compat_pages_args *args);
csa_status csa_cuda_compat_attend_paged(const csa_context *context, const csa_compat_attend_paged_args *args);
csa_status csa_cuda_compat_gather(const csa_context *context, const csa_compat_gather_args *args);
csa_status csa_cuda_compat_attend_ragged(const csa_context *context, const csa_compat_attend_ragged_args *args);
csa_status csa_cuda_compat_stage(const csa_context *context, const csa_compat_stage_args *args);

/* The kernels of each file. */
csa_status csa_cuda_load_compat_pack(void);
csa_status csa_cuda_load_compat_score(void);
csa_status csa_cuda_load_compat_pages(void);
csa_status csa_cuda_load_compat_attend(void);
csa_status csa_cuda_load_compat_copy(void);

#endif
