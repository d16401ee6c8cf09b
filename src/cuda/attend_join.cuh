/*
 * Attention's second kernel, which joins the parts of rows. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_ATTEND_JOIN_CUH
#define CSA_CUDA_ATTEND_JOIN_CUH

#include "attend_unit.cuh"
#include "launch.h"

csa_status csa_cuda_load_join(void);

/* Queued behind the kernel that leaves the parts' records; overlaps it. */
csa_status csa_cuda_join(const csa_context *context, const attend_params &p, bool fp8, int64_t rows,
                         void *stream);

#endif
