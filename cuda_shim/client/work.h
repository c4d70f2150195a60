/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of a known length, for programs that must keep a device busy. */
#ifndef AQ_CLIENT_WORK_H
#define AQ_CLIENT_WORK_H

#include <stdbool.h>
#include <stdint.h>

#include "client/driver.h"

enum work_launch { WORK_KERNEL, WORK_EX, WORK_COOPERATIVE, WORK_GRAPH, WORK_BURN };

#define WORK_GRAPH_KERNELS 10

/* The launch of that name ("kernel", "ex", "cooperative", "graph", "burn"); false for another name.
 *
 * All but "burn" spin on the clock for `kernel_us`: exact on the simulated driver, and on a real device without other users. "burn" fills
 * the device with arithmetic, `kernel_us` rounds of a loop, so that its time grows when others use the device: for measuring shares on real
 * hardware. */
bool work_launch_named(const char *name, enum work_launch *launch);

/* What is submitted, over and over. "burn" has its own grid. */
struct work {
	enum work_launch launch;
	uint64_t kernel_us;
	unsigned int blocks; /* of each kernel's grid */
	bool own_stream;     /* not the default one */
};

/* Load the kernel into the current context, and make its own stream and a graph of WORK_GRAPH_KERNELS kernels. */
CUresult work_prepare(const struct work *work);

/* Submit once: a kernel that takes `kernel_us` microseconds of a whole device, or a graph of such kernels. */
CUresult work_submit(const struct work *work);

/* Kernels in one submission. */
unsigned work_kernels(enum work_launch launch);

#endif
