/* SPDX-License-Identifier: Apache-2.0 */
/* version.c - the only object that differs between the minor versions of one major version. */
#include "simulated_runtime/runtime.h"

/* The build gives it; tools that only read the source do not. */
#ifndef RUNTIME_VERSION
#define RUNTIME_VERSION (RUNTIME_MAJOR * 1000)
#endif

const int rt_version = RUNTIME_VERSION;

static_assert(RUNTIME_VERSION / 1000 == RUNTIME_MAJOR, "RUNTIME_VERSION is 1000 * RUNTIME_MAJOR + 10 * minor");
