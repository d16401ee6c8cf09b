/*
 * Figures for people to read, such as "384 MiB", "1.2 G" and "93.0 us".
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_UNITS_H
#define CSA_TOOL_UNITS_H

#include <stdint.h>

typedef struct units_text {
    char s[32];
} units_text;

units_text units_bytes(uint64_t bytes);
units_text units_count(uint64_t count);
units_text units_seconds(double seconds);

#endif
