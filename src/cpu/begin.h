/*
 * What a tier's source includes first: everything its bodies use, before any function is compiled for the tier.
 * CSA_TARGET(features) starts the tier's region, which lasts to the end of the file.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CPU_BEGIN_H
#define CSA_CPU_BEGIN_H

#include "../context.h"
#include "../format.h"
#include "../lists.h"
#include "../numeric.h"
#include "../ref/compat.h"
#include "../ref/ref.h"
#include "../step.h"
#include "../summarize_host.h"
#include "../tokens.h"
#include "tiers.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CSA_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define CSA_TARGET(features) \
    CSA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define CSA_TARGET_END CSA_PRAGMA(clang attribute pop)
#else
#define CSA_TARGET(features) CSA_PRAGMA(GCC target(features))
#define CSA_TARGET_END
#endif

#endif
