//! The prefix cache: its tree against a naive list, and its pages against computed rows.

mod aside;
mod blocks;
mod collisions;
mod folder;
mod hashing;
mod letting_go;
mod model;
mod pages;
mod paths;
mod remote;
mod resume;
mod states;
mod swap;
mod windows;
