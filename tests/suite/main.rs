//! The behaviours of the server and its command line, one file each.

mod cli;
