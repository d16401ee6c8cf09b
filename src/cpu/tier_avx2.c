/*
 * AVX2 and FMA (Haswell, Zen and later).
 * SPDX-License-Identifier: Apache-2.0
 */
#include "begin.h"

CSA_TARGET("avx2,fma,popcnt")

#include "vec_avx2.h"
#define CSA_TIER_STAGES csa_cpu_avx2_stages
#include "bodies.h"

CSA_TARGET_END
