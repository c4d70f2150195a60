/* SPDX-License-Identifier: Apache-2.0 */
/* The interface of a fuzz target, which is libFuzzer's, and its first inputs. Under clang libFuzzer drives it (make fuzz), otherwise
 * driver.c. */
#ifndef AQ_FUZZ_FUZZ_H
#define AQ_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#define FUZZ_INPUT_MAX 4096

/* Once, before the first input. */
int LLVMFuzzerInitialize(int *argc, char ***argv);
/* Try one input; a broken promise ends the process. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Read an input from its front; past the end it is all zero. */
struct fuzz_reader {
	const uint8_t *data;
	size_t left;
};

static inline uint64_t fuzz_take(struct fuzz_reader *reader, unsigned bytes)
{
	uint64_t value = 0;

	for (unsigned i = 0; i < bytes; i++) {
		value |= (uint64_t)(reader->left ? *reader->data : 0) << (8 * i);
		if (reader->left) {
			reader->data++;
			reader->left--;
		}
	}
	return value;
}

#endif
