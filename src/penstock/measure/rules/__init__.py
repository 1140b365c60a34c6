"""The rules that only `penstock doctor` asks: they measure, read source code, or look at any loader."""
