/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client.h - what the tests of the simulated runtime share: a program as a compiler of CUDA leaves it, with two kernels and a variable.
 *
 * With a build directory as argument, each case gets a node of its own (harness.h). Without one, all cases run where they are: in a
 * container, bare or under the shim.
 */
#ifndef ALIQUOT_SIMULATED_RUNTIME_TESTS_CLIENT_H
#define ALIQUOT_SIMULATED_RUNTIME_TESTS_CLIENT_H

#include <string.h>

#include "simulated_driver/tests/harness.h"
#include "simulated_runtime/cudart_abi.h"

#define IMAGE                                                \
	"// aliquot-sim: second duration_us=1000\n"          \
	".visible .entry aliquot_spin(.param .u64 us)\n{}\n" \
	".visible .entry second(.param .u64 value)\n{}\n"    \
	".global .align 4 .b8 numbers[256];\n"
#define NUMBERS_BYTES 256

/* Stubs and a host variable: only their addresses count. */
void spin_stub(void);
void second_stub(void);
void unregistered_stub(void);
extern char numbers[NUMBERS_BYTES];

/* Register the program's code; the handle. Nothing of it calls the driver. */
void **client_register(void);
void client_register_kernel(void **handle, const void *stub, const char *name);

int client_main(int argc, char **argv, const struct test_case *cases, size_t count);

#define ONE ((dim3){ 1, 1, 1 })

/* `call` fails with this error, and it is the thread's last error once. */
#define FAILS(call, error)                                   \
	do {                                                 \
		cudaGetLastError();                          \
		CHECK_EQUAL(call, error);                    \
		CHECK_EQUAL(cudaPeekAtLastError(), error);   \
		CHECK_EQUAL(cudaGetLastError(), error);      \
		CHECK_EQUAL(cudaGetLastError(), cudaSuccess);\
	} while (0)

#endif
