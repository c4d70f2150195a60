/* SPDX-License-Identifier: Apache-2.0 */
#include "simulated_runtime/tests/client.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

char numbers[NUMBERS_BYTES];

/* Not one function to the linker: identical bodies may be folded. */
static volatile int called;

void spin_stub(void)
{
	called = 1;
}

void second_stub(void)
{
	called = 2;
}

void unregistered_stub(void)
{
	called = 3;
}

void client_register_kernel(void **handle, const void *stub, const char *name)
{
	__cudaRegisterFunction(handle, stub, NULL, name, -1, NULL, NULL, NULL, NULL, NULL);
}

void **client_register(void)
{
	static struct fatbin_wrapper wrapper = { .magic = FATBIN_WRAPPER_MAGIC, .version = 1, .data = IMAGE };
	void **handle = __cudaRegisterFatBinary(&wrapper);
	CHECK(handle != NULL);
	client_register_kernel(handle, spin_stub, "aliquot_spin");
	client_register_kernel(handle, second_stub, "second");
	__cudaRegisterVar(handle, numbers, NULL, "numbers", 0, sizeof(numbers), 0, 0);
	__cudaRegisterFatBinaryEnd(handle);
	return handle;
}

static bool run_here(const struct test_case *test)
{
	int status;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		test->run();
		exit(0);
	}
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	if (status != 0)
		fprintf(stderr, "FAILED %s (status 0x%x)\n", test->name, status);
	return status == 0;
}

int client_main(int argc, char **argv, const struct test_case *cases, size_t count)
{
	int failed = 0;
	if (argc > 1)
		return test_main(argc, argv, cases, count);
	for (size_t i = 0; i < count; i++)
		failed += !run_here(&cases[i]);
	return failed != 0;
}
