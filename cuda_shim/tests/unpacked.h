/* SPDX-License-Identifier: Apache-2.0 */
/* A container that no runtime made: an unpacked root with the front, the simulated driver behind it, limits and an empty region. For
 * programs that run the built front in their own process. */
#ifndef AQ_TESTS_UNPACKED_H
#define AQ_TESTS_UNPACKED_H

#include <dlfcn.h>

#include "tests/support.h"

/* Make it, with one device and `memory_bytes` of it, out of what lies in the directory `build`; ALIQUOT_SIM_DIR names its node from here
 * on. Answers its root. `page` is the limits page as written. */
const char *unpacked_container(const char *build, uint64_t memory_bytes, struct support_page *page);
/* Another library behind the front, before it is opened. */
void unpacked_replace_driver(const char *library);
void unpacked_remove(void);

/* Open the fronts; and the driver itself, past it. */
void *unpacked_front(void);
void *unpacked_nvml_front(void);
void *unpacked_driver(void);

/* The calls that a program makes, each a member of `cu` by its name: `CALLS(X)` names them, as X(cuInit). To be found once the container is
 * made. */
#define UNPACKED_CALLS(CALLS)                    \
	static struct {                          \
		CALLS(UNPACKED_DECLARE)          \
	} cu
#define UNPACKED_DECLARE(name) __typeof__(&name) name;
#define UNPACKED_FIND(CALLS)                     \
	do {                                     \
		void *front = unpacked_front();  \
		CALLS(UNPACKED_FIND_ONE)         \
	} while (0)
#define UNPACKED_FIND_ONE(name) CHECK(cu.name = (__typeof__(cu.name))dlsym(front, #name));

/* Write another page over the limits. */
void unpacked_write_limits(const struct support_page *page);

#endif
