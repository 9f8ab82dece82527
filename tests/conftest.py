pytest_plugins = ["isthmus_testing.fixtures"]
