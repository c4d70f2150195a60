/* SPDX-License-Identifier: Apache-2.0 */
/* One launch, as pacing sees it: what runs, how big it is, where. */
#ifndef AQ_INTERPOSE_WORK_H
#define AQ_INTERPOSE_WORK_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

/* A graph is its executable handle with no blocks. */
struct aq_work {
	const void *function;
	uint64_t blocks;
	uint32_t threads;
	CUstream stream;
	bool per_thread; /* the default stream is the calling thread's */
};

#endif
