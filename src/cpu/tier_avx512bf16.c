/*
 * AVX-512 with VBMI and BF16 (Zen 4, Sapphire Rapids and later).
 * SPDX-License-Identifier: Apache-2.0
 */
#include "begin.h"

CSA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,popcnt")

#define CSA_VEC_BF16 1
#include "vec_avx512.h"
#define CSA_TIER_STAGES csa_cpu_avx512bf16_stages
#include "bodies.h"

CSA_TARGET_END
