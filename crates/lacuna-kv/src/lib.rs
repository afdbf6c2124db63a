//! lacuna-kv
