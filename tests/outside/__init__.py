"""Parts as a researcher outside the library would write them: no future annotations, options of their own."""
