module optsched.example

go 1.19
