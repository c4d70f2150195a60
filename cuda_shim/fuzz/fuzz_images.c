/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a module image of the simulated driver: reading them ends in a description that can be written and read back, or in an
 * error; never in a read outside the image, or in memory out of proportion to it.
 *
 * The first byte of an input says what becomes of the rest: the image itself, words of PTX, changes to a valid cubin, or an entry of a fat
 * binary. */
#define _GNU_SOURCE
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "simulated_driver/image.h"
#include "tests/support.h"

#define HEADER_BYTES 16u
#define ENTRY_BYTES 64u
#define LZ4_FLAG 0x2000u
#define ZSTD_FLAG 0x8000u
#define TEXT_BYTES 24u

enum form { FORM_BYTES, FORM_TEXT, FORM_CUBIN, FORM_FATBIN, FORM_SEVERAL, FORM_LZ4, FORM_ZSTD, N_FORMS };

struct bytes {
	uint8_t *at;
	uint64_t length;
};

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	return 0;
}

static char *name_of(unsigned number)
{
	char *name = malloc(TEXT_BYTES);

	CHECK(name);
	snprintf(name, TEXT_BYTES, "name_%u", number);
	return name;
}

static void describe(struct fuzz_reader *input, struct sim_image *image)
{
	*image = (struct sim_image){ .capability = 75 + (uint32_t)fuzz_take(input, 1) % 2 * 15, .code_bytes = fuzz_take(input, 1) };
	for (unsigned kernels = (unsigned)fuzz_take(input, 1) % 4, i = 0; i < kernels; i++) {
		struct sim_image_kernel *kernel = sim_image_add_kernel(image, name_of(i));

		CHECK(kernel);
		kernel->registers = (uint32_t)fuzz_take(input, 1);
		kernel->cluster[0] = (uint32_t)fuzz_take(input, 1) % 3;
		kernel->needs_cluster = fuzz_take(input, 1) % 4 == 0;
		for (unsigned parameters = (unsigned)fuzz_take(input, 1) % 4, p = 0; p < parameters; p++)
			CHECK(sim_image_add_parameter(kernel, (struct sim_image_parameter){ p, p * 8, (uint32_t)fuzz_take(input, 2) }));
	}
	for (unsigned variables = (unsigned)fuzz_take(input, 1) % 4, i = 0; i < variables; i++) {
		uint32_t block = sim_image_add_block(image, fuzz_take(input, 1) % 4 == 0);
		struct sim_image_variable *variable = sim_image_add_variable(image, name_of(100 + i), 1 + fuzz_take(input, 1));

		CHECK(block != UINT32_MAX && variable);
		variable->block = block;
		image->blocks[block].bytes = variable->bytes;
		image->blocks[block].initial_bytes = fuzz_take(input, 1) % (variable->bytes + 1);
		image->blocks[block].initial = calloc(1, image->blocks[block].initial_bytes + 1);
		CHECK(image->blocks[block].initial);
	}
}

static struct bytes make_cubin(struct fuzz_reader *input)
{
	struct sim_image image;
	struct bytes made;

	describe(input, &image);
	CHECK(sim_image_write(&image, &made.at, &made.length) == CUDA_SUCCESS);
	sim_image_free(&image);
	return made;
}

static void change(struct fuzz_reader *input, struct bytes *bytes)
{
	for (unsigned changes = (unsigned)fuzz_take(input, 1) % 8; changes && bytes->length >= 8; changes--) {
		size_t at = fuzz_take(input, 2) % (bytes->length - 7);
		uint64_t value = fuzz_take(input, 8);

		memcpy(bytes->at + at, &value, 1 + fuzz_take(input, 1) % 8);
	}
	if (fuzz_take(input, 1) % 8 == 0)
		bytes->length = fuzz_take(input, 2) % (bytes->length + 1);
}

/* The rest of the input. */
static struct bytes rest_of(struct fuzz_reader *input)
{
	struct bytes rest = { malloc(input->left + 1), input->left };

	CHECK(rest.at);
	memcpy(rest.at, input->data, input->left);
	input->left = 0;
	return rest;
}

static struct bytes make_text(struct fuzz_reader *input)
{
	static const char *const words[] = { ".entry",     ".global",
					     ".const",     ".param",
					     ".align",     ".b8",
					     ".u64",       ".attribute(.managed)",
					     "name",       "k2",
					     "(",          ")",
					     "[",          "]",
					     ",",          ";",
					     "\n",         "//",
					     "16",         "0",
					     "4294967295", "aliquot-sim: name duration_us=5",
					     ".extern",    "1e999",
					     "." };
	struct bytes text = { calloc(1, FUZZ_INPUT_MAX * 2), 0 };

	CHECK(text.at);
	while (input->left && text.length < FUZZ_INPUT_MAX) {
		const char *word = words[fuzz_take(input, 1) % (sizeof(words) / sizeof(words[0]))];

		text.length = (uint64_t)(stpcpy((char *)text.at + text.length, word) - (char *)text.at);
		if (fuzz_take(input, 1) % 4)
			text.at[text.length++] = ' ';
	}
	return text;
}

/* Many images in one entry: their own headers, and where they are in the payload. */
static struct bytes wrap_several(struct fuzz_reader *input, struct bytes payload)
{
	uint32_t count = (uint32_t)fuzz_take(input, 1) % 4, header_bytes = ENTRY_BYTES + 8 + count * ENTRY_BYTES;
	uint64_t entries = header_bytes + payload.length;
	struct bytes fatbin = { calloc(1, HEADER_BYTES + entries), HEADER_BYTES + entries };
	uint32_t head[] = { SIM_FATBIN_MAGIC, HEADER_BYTES << 16 | 1, (uint32_t)entries, 0 };
	uint32_t entry[ENTRY_BYTES / 4] = { 0x1010100u, header_bytes, (uint32_t)payload.length, 0, 0, 0, 1, 0 };

	CHECK(fatbin.at);
	memcpy(fatbin.at, head, sizeof(head));
	memcpy(fatbin.at + HEADER_BYTES, entry, sizeof(entry));
	memcpy(fatbin.at + HEADER_BYTES + ENTRY_BYTES, &count, sizeof(count));
	for (uint32_t i = 0; i < count; i++) {
		uint32_t part[ENTRY_BYTES / 4] = {
			0x1010002u, (uint32_t)fuzz_take(input, 1), (uint32_t)payload.length, 0, 0, 0, 8, 70 + i
		};

		memcpy(fatbin.at + HEADER_BYTES + ENTRY_BYTES + 8 + (size_t)i * ENTRY_BYTES, part, sizeof(part));
	}
	memcpy(fatbin.at + HEADER_BYTES + header_bytes, payload.at, payload.length);
	free(payload.at);
	return fatbin;
}

static struct bytes wrap(struct fuzz_reader *input, enum form form, struct bytes payload)
{
	uint64_t flags = form == FORM_LZ4 ? LZ4_FLAG : form == FORM_ZSTD ? ZSTD_FLAG : 0, unpacked = fuzz_take(input, 2);
	uint64_t entries = ENTRY_BYTES + payload.length;
	struct bytes fatbin = { calloc(1, HEADER_BYTES + entries), HEADER_BYTES + entries };
	uint32_t head[] = { SIM_FATBIN_MAGIC, HEADER_BYTES << 16 | 1, (uint32_t)entries, 0 };
	uint32_t entry[ENTRY_BYTES / 4] = { 0x1010000u | (fuzz_take(input, 1) % 4 == 0 ? 1u : 2u),
					    ENTRY_BYTES,
					    (uint32_t)payload.length,
					    0,
					    (uint32_t)payload.length,
					    0,
					    8,
					    75,
					    0,
					    0,
					    (uint32_t)flags,
					    0,
					    0,
					    0,
					    (uint32_t)unpacked,
					    0 };

	CHECK(fatbin.at);
	memcpy(fatbin.at, head, sizeof(head));
	memcpy(fatbin.at + sizeof(head), entry, sizeof(entry));
	if (payload.length)
		memcpy(fatbin.at + HEADER_BYTES + ENTRY_BYTES, payload.at, payload.length);
	free(payload.at);
	return fatbin;
}

static void check_description(const struct sim_image *image, uint64_t length)
{
	uint64_t kept = 0;

	for (uint32_t i = 0; i < image->n_kernels; i++)
		CHECK(strlen(image->kernels[i].name) > 0);
	for (uint32_t i = 0; i < image->n_variables; i++)
		CHECK(image->variables[i].block < image->n_blocks);
	for (uint32_t i = 0; i < image->n_blocks; i++) {
		CHECK(image->blocks[i].initial_bytes <= image->blocks[i].bytes);
		kept += image->blocks[i].initial_bytes;
	}
	CHECK(image->is_open || kept <= 8 * length + FUZZ_INPUT_MAX * 16);
}

/* What was read can be written, and the result says the same. */
static void check_round_trip(const struct sim_image *image)
{
	struct sim_image again, small = *image;
	struct bytes written;

	for (uint32_t i = 0; i < image->n_variables; i++)
		if (image->variables[i].bytes > FUZZ_INPUT_MAX || image->code_bytes > FUZZ_INPUT_MAX)
			return;
	small.capability = 75;
	if (sim_image_write(&small, &written.at, &written.length) != CUDA_SUCCESS)
		return;
	CHECK(sim_image_read((struct sim_view){ written.at, written.length }, 75, &again) == CUDA_SUCCESS);
	CHECK(again.n_kernels == image->n_kernels);
	CHECK(again.n_kernels == 0 || again.code_bytes == image->code_bytes);
	sim_image_free(&again);
	free(written.at);
}

static struct bytes make(struct fuzz_reader *input, enum form form)
{
	struct bytes made;

	if (form == FORM_TEXT)
		return make_text(input);
	if (form == FORM_BYTES)
		return rest_of(input);
	if (form == FORM_LZ4 || form == FORM_ZSTD)
		return wrap(input, form, rest_of(input));
	made = make_cubin(input);
	if (fuzz_take(input, 1) % 4 == 0)
		made.at[EI_OSABI] = 0x41; /* the newer ABI */
	if (form == FORM_FATBIN)
		made = wrap(input, form, made);
	else if (form == FORM_SEVERAL)
		made = wrap_several(input, made);
	change(input, &made);
	return made;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_reader input = { data, bytes };
	enum form form = (enum form)(fuzz_take(&input, 1) % N_FORMS);
	struct sim_image image;
	struct bytes made = make(&input, form);
	uint8_t *exact = malloc(made.length ? made.length : 1); /* a read past its end is one past a block */
	CHECK(exact);
	if (made.length)
		memcpy(exact, made.at, made.length);
	free(made.at);
	if (sim_image_read((struct sim_view){ exact, made.length }, 75, &image) == CUDA_SUCCESS) {
		check_description(&image, made.length);
		check_round_trip(&image);
	}
	sim_image_free(&image);
	free(exact);
	return 0;
}
