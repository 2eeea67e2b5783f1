import json, sys
for f in sys.argv[1:]:
    try: r = json.load(open(f))
    except Exception as e: print(f, e); continue
    print(f, r.get("left_out"), r.get("broken"))
    for t in r.get("targets", []): print(t.get("value"), t["unit"], "|", t["name"], "|", t.get("failed") or f"{t['baseline']} {t['baseline_name']}", {k: t[k] for k in ("us", "map_us", "beside_us") if k in t})
    cases = {}
    for x in r.get("rows", []):
        n = x["name"].replace("scatter_gather", "SG") + ("@%.1f" % x["held"] if x["held"] else "") + ("*" if x["mode"] == "graph" else "")
        v = "%.1f" % x["half_us"] if x["half_us"] else "-" if x["error"] else "?"
        cases.setdefault((x["place"], x["case"], x["adapter_keys"]), []).append(f"{n}={v}" + (f"(map {x['map_us']:.0f})" if x.get("map_us") and "no key" not in n else "") + ("FAILED " + x["error"] if x["failed"] else ""))
    for c, v in cases.items(): print(*c, " ".join(v))
