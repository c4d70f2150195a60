/* SPDX-License-Identifier: Apache-2.0 */
/* The table of parts.def. This file uses all parts, and no file uses this one: life_cycle.c finds the table by its section. */
#include "interpose/allocations.h"
#include "interpose/capture.h"
#include "interpose/code.h"
#include "interpose/context.h"
#include "interpose/deferred.h"
#include "interpose/latch.h"
#include "interpose/lazy.h"
#include "interpose/launch.h"
#include "interpose/life_cycle.h"
#include "interpose/measure.h"
#include "interpose/pace.h"
#include "interpose/reservoir.h"
#include "interpose/sample.h"
#include "interpose/spread.h"
#include "interpose/vmm.h"

/* Frees in stream order are in one list for all devices, and pools may outlive a context. */
static void reclaim_deferred(int device)
{
	(void)device;
	aq_deferred_settle();
}

__attribute__((section(AQ_PARTS), used)) static const struct aq_part parts[] = {
#define PART(...) { __VA_ARGS__ },
#include "interpose/parts.def"
#undef PART
};
