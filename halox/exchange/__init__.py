"""Exchange plans: which messages go which path, agreed with the peers, made once and used every step."""
