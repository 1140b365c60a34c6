"""The rules that only `headrace doctor` asks: they measure, read source code, or look at any loader."""
