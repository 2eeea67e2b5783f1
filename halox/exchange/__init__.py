"""Exchange plans: messages and their paths, agreed with the peers, made once and used in every step."""
