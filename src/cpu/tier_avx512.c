/*
 * AVX-512 without BF16 (Skylake-X, Ice Lake).
 * SPDX-License-Identifier: Apache-2.0
 */
#include "begin.h"

CSA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")

#define CSA_VEC_BF16 0
#include "vec_avx512.h"
#define CSA_TIER_STAGES csa_cpu_avx512_stages
#include "bodies.h"

CSA_TARGET_END
