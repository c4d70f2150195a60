/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that come of fork alone: forked ASK_MIB COUNT
 *
 * COUNT children and their parent each allocate up to ASK_MIB in pieces of 16 MiB, stay until all are done, and print what they hold as one
 * JSON line. A last line says what the driver answers to a child that was forked from a process which had initialised it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_abi.h"

#define MIB ((size_t)1 << 20)
#define PIECE (16 * MIB)

static __typeof__(&cuInit) init;
static __typeof__(&cuDevicePrimaryCtxRetain) retain;
static __typeof__(&cuCtxSetCurrent) set_current;
static __typeof__(&cuMemAlloc_v2) mem_alloc;

static void resolve(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	if (!driver) {
		fprintf(stderr, "forked: expected to open libcuda.so.1, found: %s\n", dlerror());
		exit(1);
	}
	init = (__typeof__(init))dlsym(driver, "cuInit");
	retain = (__typeof__(retain))dlsym(driver, "cuDevicePrimaryCtxRetain");
	set_current = (__typeof__(set_current))dlsym(driver, "cuCtxSetCurrent");
	mem_alloc = (__typeof__(mem_alloc))dlsym(driver, "cuMemAlloc_v2");
}

static size_t take(size_t ask)
{
	CUcontext context;
	CUdeviceptr pointer;
	size_t held = 0;
	if (init(0) != CUDA_SUCCESS || retain(&context, 0) != CUDA_SUCCESS || set_current(context) != CUDA_SUCCESS)
		return 0;
	while (held < ask && mem_alloc(&pointer, PIECE) == CUDA_SUCCESS)
		held += PIECE;
	return held;
}

int main(int argc, char **argv)
{
	int done[2], go[2];
	char byte = 0;
	if (argc != 3 || pipe(done) != 0 || pipe(go) != 0)
		return 2;
	size_t ask = strtoul(argv[1], NULL, 10) * MIB;
	int children = atoi(argv[2]);
	resolve();
	for (int child = 0; child < children; child++) {
		if (fork() != 0)
			continue;
		close(go[1]);
		printf("{\"event\":\"forked\",\"held_bytes\":%zu}\n", take(ask));
		fflush(stdout);
		if (write(done[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 0) /* stays until the parent closes its end */
			_exit(1);
		_exit(0);
	}
	printf("{\"event\":\"forked\",\"held_bytes\":%zu}\n", take(ask));
	fflush(stdout);
	for (int child = 0; child < children; child++)
		if (read(done[0], &byte, 1) != 1)
			return 1;
	close(go[1]);
	while (wait(NULL) > 0)
		;
	if (fork() == 0) {
		CUdeviceptr pointer;
		printf("{\"event\":\"after\",\"result\":%d}\n", (int)mem_alloc(&pointer, PIECE));
		fflush(stdout);
		_exit(0);
	}
	wait(NULL);
	return 0;
}
