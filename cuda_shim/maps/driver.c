/* Nothing: the linker only reads the name of the library made from this. */
