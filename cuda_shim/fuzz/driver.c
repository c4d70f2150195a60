/* SPDX-License-Identifier: Apache-2.0 */
/* Drives a fuzz target where there is no libFuzzer: inputs that are random, and inputs that are earlier ones, changed a little.
 *
 * The sequence is the same in every run, so a failure can be reproduced; its input is written with the message. FUZZ_RUNS is their number
 * (the default keeps `make check` short), FUZZ_SEED starts another sequence. Argument: the build directory, or a file to try once. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz/fuzz.h"

#define DEFAULT_RUNS 1500
#define KEPT 64 /* earlier inputs that new ones are made from */
#define CHANGES_MAX 8

static struct input {
	uint8_t data[FUZZ_INPUT_MAX];
	size_t bytes;
} kept[KEPT], current;

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint64_t chance(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

/* On the way out of a crash: only calls that are allowed in a signal handler. */
static void show_input(int number)
{
	static const char digits[] = "0123456789abcdef";
	static char text[2 * FUZZ_INPUT_MAX + 1];

	for (size_t i = 0; i < current.bytes; i++) {
		text[2 * i] = digits[current.data[i] >> 4];
		text[2 * i + 1] = digits[current.data[i] & 15];
	}
	text[2 * current.bytes] = '\n';
	if (write(STDERR_FILENO, "input: ", 7) < 0 || write(STDERR_FILENO, text, 2 * current.bytes + 1) < 0)
		_exit(1);
	signal(number, SIG_DFL);
	raise(number);
}

static void show_at_exit(void)
{
	if (current.bytes)
		show_input(SIGABRT);
}

static void change(struct input *input)
{
	static const uint64_t telling[] = { 0, 1, 63, 64, 255, 4096, 0x7fffffff, 0x80000000, 0xffffffff, INT64_MAX, UINT64_MAX };
	size_t at = chance(input->bytes + 1);
	uint64_t value = chance(2) ? telling[chance(sizeof(telling) / sizeof(telling[0]))] : state;
	size_t width = (size_t)1 << chance(4);

	switch (chance(4)) {
	case 0: /* overwrite */ memcpy(input->data + at, &value, at + width <= input->bytes ? width : input->bytes - at); break;
	case 1: /* one bit */
		if (at < input->bytes)
			input->data[at] ^= (uint8_t)(1u << chance(8));
		break;
	case 2: /* longer */
		if (input->bytes + width <= FUZZ_INPUT_MAX) {
			memmove(input->data + at + width, input->data + at, input->bytes - at);
			memcpy(input->data + at, &value, width);
			input->bytes += width;
		}
		break;
	default: /* shorter */ input->bytes = chance(8) ? input->bytes : at;
	}
}

static void next_input(void)
{
	current = kept[chance(KEPT)];
	if (!current.bytes || !chance(8)) {
		current.bytes = 1 + chance(chance(4) ? 256 : FUZZ_INPUT_MAX);
		for (size_t i = 0; i < current.bytes; i++)
			current.data[i] = (uint8_t)chance(256);
	}
	for (uint64_t i = chance(CHANGES_MAX); i > 0; i--)
		change(&current);
	if (!chance(4))
		kept[chance(KEPT)] = current;
}

static uint64_t number_from(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

static int try_file(const char *path)
{
	FILE *file = fopen(path, "rb");

	if (!file)
		return perror(path), 1;
	current.bytes = fread(current.data, 1, sizeof(current.data), file);
	fclose(file);
	LLVMFuzzerTestOneInput(current.data, current.bytes);
	current.bytes = 0;
	return 0;
}

int main(int argc, char **argv)
{
	struct stat about;
	uint64_t runs = number_from("FUZZ_RUNS", DEFAULT_RUNS);

	state ^= number_from("FUZZ_SEED", 0) * 0x2545f4914f6cdd1du;
	signal(SIGSEGV, show_input);
	signal(SIGBUS, show_input);
	signal(SIGABRT, show_input);
	atexit(show_at_exit);
	LLVMFuzzerInitialize(&argc, &argv);
	if (argc > 1 && stat(argv[1], &about) == 0 && S_ISREG(about.st_mode))
		return try_file(argv[1]);
	for (uint64_t run = 0; run < runs; run++) {
		next_input();
		LLVMFuzzerTestOneInput(current.data, current.bytes);
	}
	current.bytes = 0;
	return 0;
}
